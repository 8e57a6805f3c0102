"""Engines of other projects: their copy of the weights, and requests with images as files."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from verl.config import full_key
from verl.data_proto.media import Clip, ImageFiles, Media
from verl.data_proto.samples import PromptRequest
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ModelError
from verl.families import EngineFacts
from verl.rollout.api import RolloutEngine, WeightTransfer


@dataclass(eq=False)
class OwnWeights(RolloutEngine):
    """An engine with a copy of the weights. It begins with the weights of the model's files."""

    facts = EngineFacts(holds_weights=True)
    num_fetched_bytes = 0  # over TCP, of the newest update, by all workers
    _is_whole, _is_fresh = True, False  # whether the last update ended well, and came after the last version
    _: KW_ONLY
    transfer: WeightTransfer

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A context for an update: nothing may be generated until the block has succeeded."""
        self.discard()
        yield
        self._is_whole = self._is_fresh = True

    def discard(self) -> None:
        """Mark the weights as lost: nothing may be generated until an update."""
        self._is_whole = self._is_fresh = False

    def publish(self, version: int) -> None:
        """See RolloutEngine. Raises ModelError when no new weights came for a new version."""
        self.require_whole()
        if version != self.weight_version and not self._is_fresh:
            raise ModelError(
                f"Version {version} was published, but no new weights have come since version {self.weight_version}; its "
                "samples would come from old weights. Call load before publish."
            )
        super().publish(version)
        self._is_fresh = False

    def require_whole(self) -> None:
        """Raise ModelError if the last update failed, or if `discard` was called and no update came."""
        if not self._is_whole:
            raise ModelError(
                f"The rollout engine's weights are between version {self.weight_version} and the next one, since an update "
                "did not end well or did not come. They cannot generate: update again, or start the run again."
            )


def with_files(request: PromptRequest, tokenizer: Tokenizer) -> PromptRequest:
    """The request as engines take it that have an image processor: one token stands for each image, and `media.files` has all
    images. Raises ModelError if the tokens of an image are not the tokenizer's."""
    if not request.placed:
        return request
    ids, processor, read, at = request.token_ids, tokenizer.processor, [], 0
    contents: list[bytes | Clip] = []
    arguments: dict[str, Any] = {}
    for span in request.placed:
        files = span.media.files
        assert files is not None, "the processor keeps files"
        contents += files.contents
        arguments = files.arguments
        for text, content in zip(span.media.texts, files.contents, strict=True):
            part = tuple(tokenizer.encode(text, add_special_tokens=False))
            first = max(at, span.start - len(part))
            start = next((i for i in range(first, len(ids) - len(part) + 1) if ids[i : i + len(part)] == part), None)
            if start is None:
                raise ModelError(
                    f"Prompt {request.ordinal} has other tokens for an image than the tokenizer gives. Use "
                    f"{full_key('rollout.name')}=native."
                )
            read += [*ids[at:start], processor.video_token_id if isinstance(content, Clip) else processor.token_id]
            at = start + len(part)
    media = Media("", {}, files=ImageFiles(tuple(contents), arguments, ids))
    return replace(request, token_ids=(*read, *ids[at:]), media=media, spans=())
