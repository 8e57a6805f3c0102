"""Checks of every row of the data (schema, template, length, repetition), and of the reward on reference answers."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from verl.cli.checklist import Subject, beginning, no_rows, steps_line, unusable_rows
from verl.cli.report import Level, Line, fail, info, passed, skip, warn
from verl.data_proto.tokenizer import Tokenizer
from verl.families import engine_facts

if TYPE_CHECKING:
    from verl.config import DataConfig
    from verl.data.check import RowsReport
    from verl.data.conversations.dataset import ConversationDataset
    from verl.data.dataset import PromptRows


def check_conversations(subject: Subject) -> Iterator[Line]:
    """Format, tokens, cut and unusable rows of each file, and the first row with its trained text marked."""
    if subject.tokenizer is None:
        yield skip("not checked without a tokenizer")
        return
    config = subject.config.data
    train = yield from _files(subject, "training", "data.train_files", config.train_files, config.train_max_samples)
    yield from _files(subject, "validation", "data.val_files", config.val_files, config.val_max_samples)
    if train is None or not len(train):
        return
    yield info(f"first row, trained text in [[ ]]: {_first_row(train, subject.tokenizer)!r}")
    yield steps_line(subject, len(train), "rows")


def _files(
    subject: Subject, name: str, key: str, files: object, max_samples: int
) -> Generator[Line, None, ConversationDataset | None]:
    from verl.programs.api import PROGRAMS

    if not files:
        yield no_rows(subject, name, key)
        return None
    program: Any = PROGRAMS.get(subject.loaded.schema.name)
    dataset: ConversationDataset = program.load_rows(
        subject.config, files, subject.tokenizer, max_samples=max_samples, seed=None, keep_going=True
    )
    for summary in dataset.summaries:
        counts, *remarks = summary.sentences()
        yield Line("fail" if summary.num_problems else "pass", f"{name}: {counts}")
        for sentence in remarks:
            yield warn(sentence)
        for feature, count in summary.features.items():
            yield fail(f"{count:,} {name} rows: {feature}")
        num_more = summary.num_problems - len(summary.problems) - summary.features.total()
        yield from unusable_rows(summary.problems, num_more, name)
    return dataset


def _first_row(dataset: ConversationDataset, tokenizer: Tokenizer) -> str:
    """The text of the first sequence, with its trained segments in [[ ]]."""
    sequence = dataset[0][0]
    ids, mask = sequence.input_ids.tolist(), sequence.loss_mask.tolist()
    segments, start = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            text = tokenizer.decode(ids[start:end])
            segments.append(f"[[{text}]]" if mask[start] else text)
            start = end
    return beginning("".join(segments))


def check_rows_of_data(subject: Subject) -> Iterator[Line]:
    """Counts, lengths, invalid rows, repeated prompts."""
    from verl.data.check import check_data
    from verl.data.order import order_of
    from verl.programs.ppo_data import known_loops, scoring_of

    if subject.tokenizer is None:
        yield skip("not checked without a tokenizer")
        return
    config = subject.config.data
    subject.data = check_data(config, subject.tokenizer, known_loops(subject.config), scoring_of(subject.config))
    for name, key, rows in (
        ("training", "data.train_files", subject.data.train),
        ("validation", "data.val_files", subject.data.validation),
    ):
        yield from [no_rows(subject, name, key)] if rows is None else _rows_lines(name, rows, config)
    if subject.data.num_shared:
        yield warn(f"{subject.data.num_shared} validation prompts occur in the training rows too")
    if (train := subject.data.train) is not None and not train.num_problems:
        left_out = train.num_overlong if config.filter_overlong_prompts else 0
        unit = f"prompts x {subject.config.actor_rollout_ref.rollout.n} samples"
        yield steps_line(subject, train.num_rows - left_out, unit)
    if config.sampler.class_path and train is not None and subject.data.ok:
        order_of(_load(subject, config.train_files, config.train_max_samples), config)
    if subject.config.distillation.enabled and subject.data.train is not None and subject.data.ok:
        yield _teachers(subject)


def _teachers(subject: Subject) -> Line:
    from verl.programs.distillation import check_teachers

    data = subject.config.data
    rows = _load(subject, data.train_files, data.train_max_samples)
    check_teachers(subject.config, subject.tokenizer, rows)
    return passed("every row has its teacher and the columns that distillation reads")


def _load(subject: Subject, files: Any, max_samples: int) -> PromptRows:
    """The rows that a run reads, after an earlier check of them."""
    from verl.data.dataset import load_dataset
    from verl.programs.ppo_data import scoring_of

    scored = scoring_of(subject.config)
    config = subject.config.data
    return load_dataset(files, subject.tokenizer, config, max_samples=max_samples, scored=scored, checked=True)


def check_template(subject: Subject) -> Iterator[Line]:
    """The first training prompt as the model reads it."""
    from verl.data.prompts import PromptEncoder
    from verl.programs.ppo_data import tokenizer_notices

    config = subject.config.data
    files, max_samples = config.train_files, config.train_max_samples
    if not files:
        files, max_samples = config.val_files, config.val_max_samples
    if subject.tokenizer is None or subject.data is None or not subject.data.ok or not files:
        yield skip("not checked without usable rows")
        return
    rows = _load(subject, files, max_samples)
    row, encoder = rows[0], PromptEncoder(subject.tokenizer, config)
    kwargs = row.get("template_kwargs", {})
    ids = encoder.encode_row(rows.prompt(row), rows.place(0), rows.images(row), kwargs).ids
    text = subject.tokenizer.decode(ids)
    for sentence in tokenizer_notices(subject.config, subject.tokenizer):
        yield warn(sentence)
    yield info(f"the model reads {len(ids)} tokens: {beginning(text)!r}")


def check_reward(subject: Subject) -> Iterator[Line]:
    """The reward function loads, its manager can be built, and it scores the reference answer of every row."""
    from verl.config.active_keys import brings_reward
    from verl.models.load import load_tokenizer
    from verl.rewards.check import check_references
    from verl.rewards.managers import build_reward_manager
    from verl.rewards.managers.build import build_pool
    from verl.roles.reward import called_manager
    from verl.roles.reward_model import examine_reward_model

    config = subject.config
    if called_manager(config.reward, subject.tokenizer) is None:
        max_tokens = config.actor_rollout_ref.rollout.response_length
        build_reward_manager(config.reward, max_response_length=max_tokens).close()
    if config.reward.reward_model.enable:
        model = config.reward.reward_model
        examine_reward_model(model)
        if model.model_path and not engine_facts(model.rollout.name).asks_service:  # whose models other processes load
            load_tokenizer(model.model_path)
        with closing(build_pool(config.reward)) as pool:
            pool.start([])
        yield skip("reference answers are not scored: that needs the reward model")
        return
    if brings_reward(subject.config):
        yield skip("reference answers are not scored: episodes bring their rewards")
        return
    if subject.data is None or not subject.data.ok:
        yield skip("not run without usable rows")
        return
    levels: dict[str, Level] = {"pass": "pass", "warn": "warn", "fail": "fail"}
    sources = check_references(_rows(subject), config.reward)
    if not sources:
        yield skip("no row has a reward_model; the teacher alone trains")
    for source in sources:
        yield Line(levels[source.level], source.sentence)
        for failure in source.failures:
            yield info(failure)


def _rows(subject: Subject) -> Iterator[dict[str, Any]]:
    from verl.data.schema import UNSCORED

    config = subject.config.data
    for files, count in ((config.train_files, config.train_max_samples), (config.val_files, config.val_max_samples)):
        if files:
            rows = _load(subject, files, count)
            for number in range(len(rows)):
                row = rows[number]
                if rows.scored or row["reward_model"] != UNSCORED:
                    yield {**row, "data_source": row[config.reward_fn_key]}


def _rows_lines(name: str, rows: RowsReport, config: DataConfig) -> Iterator[Line]:
    sources = ", ".join(f"{source} {count:,}" for source, count in rows.data_sources.most_common(6))
    lengths = f"prompts of {rows.mean_length:.0f} tokens on average, {rows.max_length} at most"
    line = f"{rows.num_rows:,} {name} rows ({sources}); {lengths}" if sources else f"no {name} row can be used"
    yield Line("fail" if rows.num_problems else "pass", line)
    yield from unusable_rows(rows.problems, rows.num_more, name)
    if rows.num_overlong and not rows.num_problems:
        effect = "left out" if config.filter_overlong_prompts else f"cut ({config.truncation})"
        yield warn(
            f"{rows.num_overlong} {name} prompts exceed data.max_prompt_length={config.max_prompt_length}: {effect}"
        )
    if rows.num_control:
        yield warn(
            f"{rows.num_control} {name} rows have control tokens in their messages, the first {rows.first_control}; the "
            "model reads them as such, not as text"
        )
    if rows.num_repeated:
        yield warn(f"{rows.num_repeated} {name} rows repeat an earlier prompt")
