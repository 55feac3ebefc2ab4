import os
import sys

# The stub ignores PYTHONPATH, and numpy 2 kills it at the first BYTES tensor.
sys.path[:0] = os.environ["IAOP_TRITON_MODEL_PATH"].split(os.pathsep)

from scripted_llm import TritonPythonModel  # noqa: E402, F401
