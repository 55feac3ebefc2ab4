"""Writes an ONNX model whose weights stream into a file beside it as they are made.

`onnx.helper` keeps every weight in memory until the end and can't pass 2 GiB; here a weight goes
straight to `model.onnx.data` and only its place stays in the graph. ONNX Runtime maps that file.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

__all__ = ["MODEL_FILE", "ModelWriter"]

MODEL_FILE: Final = "model.onnx"
_DATA_FILE: Final = "model.onnx.data"
_ALIGNMENT: Final = 4096
"""Weights begin on page borders, so that a mapped one needs no copy."""


class ModelWriter:
    """Collects nodes and weights, then writes `model.onnx` and `model.onnx.data`.

    A context manager: the data file is open inside it. `save` writes the graph.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = (folder / _DATA_FILE).open("wb")
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._used: dict[str, int] = {}

    def __enter__(self) -> ModelWriter:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._data.close()

    def input(self, name: str, kind: int, shape: list[int | str]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: list[int | str]) -> str:
        self._outputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Adds a small tensor that stays inside `model.onnx`."""
        self._initializers.append(numpy_helper.from_array(value, name))
        return name

    def weight(self, name: str, value: NDArray[Any]) -> str:
        """Appends a tensor to the data file."""
        self._data.write(b"\0" * (-self._data.tell() % _ALIGNMENT))
        proto = TensorProto(
            name=name,
            dims=value.shape,
            data_type=helper.np_dtype_to_tensor_dtype(value.dtype),
            data_location=TensorProto.EXTERNAL,
        )
        place = {"location": _DATA_FILE, "offset": self._data.tell(), "length": value.nbytes}
        for key, entry in place.items():
            proto.external_data.add(key=key, value=str(entry))
        self._data.write(np.ascontiguousarray(value).data)
        self._initializers.append(proto)
        return name

    def node(
        self, operator: str, *inputs: str, outputs: tuple[str, ...] = (), **attributes: Any
    ) -> str:
        """Adds a node of the standard operators and returns the name of its first output."""
        return self._add(operator, "", inputs, outputs, attributes)

    def contrib(
        self, operator: str, *inputs: str, outputs: tuple[str, ...] = (), **attributes: Any
    ) -> str:
        """Adds a node of ONNX Runtime's own operators (domain `com.microsoft`)."""
        return self._add(operator, "com.microsoft", inputs, outputs, attributes)

    def _add(
        self,
        operator: str,
        domain: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        attributes: dict[str, Any],
    ) -> str:
        number = self._used[operator] = self._used.get(operator, -1) + 1
        name = f"{operator}_{number}"
        names = list(outputs or (name,))
        self._nodes.append(
            helper.make_node(operator, inputs, names, name=name, domain=domain, **attributes)
        )
        return names[0]

    def save(self) -> None:
        """Writes the graph; nothing can be added afterwards."""
        graph = helper.make_graph(
            self._nodes, "decoder", self._inputs, self._outputs, self._initializers
        )
        model = helper.make_model(
            graph,
            # Versions that every ONNX Runtime this package supports can read.
            ir_version=10,
            opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
            producer_name="iaop-onnx-local",
        )
        (self._folder / MODEL_FILE).write_bytes(model.SerializeToString())
