import os
import sys

# Triton's own module imports numpy, and the stub ignores PYTHONPATH.
sys.path[:0] = os.environ["IAOP_TRITON_MODEL_PATH"].split(os.pathsep)


class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("the engine file is missing")
