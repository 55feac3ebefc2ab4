"""The ceiling: `session.run` in a loop, on one cache buffer, with an argmax and nothing else."""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from protocol import Answer, Clock, Request, serve


class SessionLoop:
    def load(
        self, *, model: str, threads: int, end_ids: list[int], profiled: bool = False
    ) -> dict[str, Any]:
        config = json.loads((Path(model) / "genai_config.json").read_text("utf-8"))["model"]
        decoder = config["decoder"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.enable_profiling = profiled
        options.profile_file_prefix = str(Path(tempfile.gettempdir()) / "bench-onnx")
        self._session = onnxruntime.InferenceSession(
            str(Path(model) / decoder["filename"]), options, providers=["CPUExecutionProvider"]
        )
        self._cache_shape = (decoder["num_key_value_heads"], decoder["head_size"])
        self._end_ids = end_ids
        self._pasts = [i for i in self._session.get_inputs() if i.name.startswith("past_key_")]
        (logits,) = (o for o in self._session.get_outputs() if o.name == "logits")
        self._vocabulary, self._last_logits_only = logits.shape[-1], logits.shape[1] == 1
        return {name: version(name) for name in ("onnxruntime", "numpy")}

    def run(self, requests: list[Request]) -> list[Answer]:
        """Answers prompts of one length as one batch. `run_s` tells each decoding run's time."""
        clock = Clock()
        ids = np.array([request["ids"] for request in requests], np.int64)
        rows, length = ids.shape
        new_tokens = requests[0]["new_tokens"]
        binding = self._session.io_binding()
        heads, size = self._cache_shape
        for past in self._pasts:
            kind = np.float16 if past.type == "tensor(float16)" else np.float32
            buffer = np.zeros((rows, heads, length + new_tokens, size), kind)
            value = onnxruntime.OrtValue.ortvalue_from_numpy(buffer)
            binding.bind_ortvalue_input(past.name, value)
            binding.bind_ortvalue_output(past.name.replace("past_key_values", "present"), value)
        row_logits = np.empty((rows, 1, self._vocabulary), np.float32)
        step_logits = onnxruntime.OrtValue.ortvalue_from_numpy(row_logits)
        pieces, run_s, chosen = [], [], []
        for end in range(length, length + new_tokens):
            binding.bind_cpu_input("input_ids", ids)
            binding.bind_cpu_input("attention_mask", np.ones((rows, end), np.int64))
            whole = ids.shape[1] > 1 and not self._last_logits_only
            if whole:
                binding.bind_output("logits", "cpu")
            else:
                binding.bind_ortvalue_output("logits", step_logits)
            before = clock()
            self._session.run_with_iobinding(binding)
            run_s.append(clock() - before)
            logits = binding.get_outputs()[-1].numpy()[:, -1] if whole else row_logits[:, -1]
            logits[:, self._end_ids] = -np.inf
            ids = logits.argmax(-1)[:, None]
            chosen.append(ids[:, 0].tolist())
            pieces.append(clock())
        return [
            {
                "submitted": 0.0,
                "began": 0.0,
                "first": pieces[0],
                "ended": pieces[-1],
                "pieces": pieces,
                "count": new_tokens,
                "prompt_tokens": length,
                "ids": [step[row] for step in chosen],
                "run_s": run_s[1:],
            }
            for row in range(rows)
        ]

    def operator_times(self, last_runs: int) -> dict[str, float]:
        """Ends profiling; seconds of each kind of operator in the last runs, and of the `whole`."""
        file = Path(self._session.end_profiling())
        events = json.loads(file.read_text("utf-8"))
        file.unlink()
        runs = [event for event in events if event["name"] == "model_run"][-last_runs:]
        times = {"whole": sum(run["dur"] for run in runs) / 1e6}
        for event in events:
            if event["name"].endswith("_kernel_time") and event["ts"] >= runs[0]["ts"]:
                kind = event["args"]["op_name"]
                times[kind] = times.get(kind, 0.0) + event["dur"] / 1e6
        return times


if __name__ == "__main__":
    serve(SessionLoop())
