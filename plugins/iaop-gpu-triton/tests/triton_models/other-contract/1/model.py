import os
import sys

# Triton's own module imports numpy, and the stub ignores PYTHONPATH.
sys.path[:0] = os.environ["IAOP_TRITON_MODEL_PATH"].split(os.pathsep)


class TritonPythonModel:
    """Never asked: a client must refuse this model by its tensors."""

    def execute(self, requests):
        raise AssertionError("a model with these tensors was sent a request")
