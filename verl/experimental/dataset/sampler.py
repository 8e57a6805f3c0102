"""Import path of verl.compat.samplers: the bases of samplers."""

from verl.compat.samplers import AbstractCurriculumSampler, AbstractSampler

__all__ = ["AbstractCurriculumSampler", "AbstractSampler"]
