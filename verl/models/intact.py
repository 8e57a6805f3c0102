"""Model folders that verl has written, compared with their manifests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.errors import ModelError
from verl.foreign_text import clean
from verl.manifest import MANIFEST, find_damage, manifest_above, verification

READ = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken", ".py")  # files that loading may open


def require_intact(folder: Path, *, weights: bool) -> None:
    """Raise ModelError if a file that loading opens, `weights` among them, has changed since verl wrote the folder."""
    if (place := manifest_above(folder)) is not None:
        _refuse(folder, place, find_damage(place[0], reads=_opened_by_loading(place[1], weights)))


@contextmanager
def verified(folder: Path) -> Iterator[None]:
    """As `require_intact`, beside the block that loads the folder. Its errors may be consequences of the damage; then that
    is raised in their place."""
    if (place := manifest_above(folder)) is None:
        yield
        return
    with verification(place[0], _opened_by_loading(place[1], True)) as damage:
        try:
            yield
        except Exception:
            _refuse(folder, place, damage())
            raise
        _refuse(folder, place, damage())


def _opened_by_loading(part: str, weights: bool) -> Callable[[str], bool]:
    endings = tuple(ending for ending in READ if weights or ending != ".safetensors")
    return lambda name: name.startswith(part) and "/" not in name[len(part) :] and name.endswith(endings)


def _refuse(folder: Path, place: tuple[Path, str], damage: str | None) -> None:
    if damage is not None:
        fix = "use another checkpoint" if place[1] else f"if you changed it on purpose, remove {MANIFEST} there"
        raise ModelError(f"{clean(folder)} is damaged: {clean(damage)}. Write or copy it again, or {fix}.")
