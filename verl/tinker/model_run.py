"""The run folder of a model: metrics, samples and spans of its optimizer steps, for `verl view` and `verl show`."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from verl.data_proto.tokenizer import Tokenizer
from verl.tinker.records import Datum
from verl.tinker.rows import prompt_length
from verl.tracking.files import append_rows
from verl.tracking.run_folder import RunFolder
from verl.tracking.timeline import SpanPhases, Spans, Timeline, span_metrics

log = logging.getLogger(__name__)

_MOST_ROWS = 256  # of a step
_PHASES: SpanPhases = {
    "forward_backward": ("update", "actor"),
    "optim_step": ("update", "actor"),
    "save": ("saving", None),
}


class ModelRun:
    """Records what a model computes, in `folder`. A full disk loses records. For the computing thread."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self._folder, self._tokenizer = RunFolder(folder), tokenizer
        self.spans = Spans(self._folder.spans, timeline=Timeline(self._folder.timeline, spans=_PHASES))
        self._rows: list[dict[str, object]] = []
        self._groups: dict[bytes, list[int]] = {}  # prompt -> its number, and how many rows it has

    def add(self, loss: str, data: Sequence[Datum], log_probs: Sequence[np.ndarray]) -> None:
        """Take rows of a forward_backward, with one target at each position, as samples of the next step."""
        for datum, computed in zip(data, log_probs, strict=True):
            if computed.ndim == 1 and len(self._rows) < _MOST_ROWS:
                self._rows.append(self._row(loss, datum, computed))

    def discard(self) -> None:
        """Forget the rows of the step that has ended, or was given up."""
        self._rows, self._groups = [], {}

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the records of optimizer step `step`."""
        try:
            append_rows(self._folder.metrics, [{**metrics, **span_metrics(self.spans.take(), {})}])
            file = self._folder.sample_file("train", step)
            file.parent.mkdir(parents=True, exist_ok=True)
            append_rows(file, self._rows)
            self.spans.write(step)
        except OSError as error:
            log.warning("Records of step %d in %s are lost: %s", step, self._folder.root, error)

    def rewind(self, step: int) -> None:
        """Remove the records of steps after `step`: the model takes these steps again."""
        self._folder.truncate_after(step)

    def _row(self, loss: str, datum: Datum, log_probs: np.ndarray) -> dict[str, object]:
        first = prompt_length(datum, loss)
        prompt, inputs = datum.tokens[:first], {name: values[first - 1 :] for name, values in datum.inputs.items()}
        group = self._groups.setdefault(prompt.tobytes(), [len(self._groups), 0])
        row = {
            "data_source": loss, "ordinal": group[0], "sample_index": group[1],
            "prompt": self._tokenizer.decode(prompt.tolist()),
            "response": self._tokenizer.decode(inputs["target_tokens"].tolist()),
            "prompt_ids": prompt.tolist(), "response_ids": inputs["target_tokens"].tolist(),
            "train_log_probs": log_probs[first - 1 :].tolist(),
        }  # fmt: skip
        group[1] += 1
        named = {"log_probs": "logprobs", "advantages": "advantages", "weights": "weights"}
        return row | {name: inputs[column].tolist() for name, column in named.items() if column in inputs}
