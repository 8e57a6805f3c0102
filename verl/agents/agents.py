"""The agents of a rank: from the config to the episodes of a batch."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import DTypeLike

from verl.agents.continuity import ChatContinuity
from verl.agents.driver import EpisodeDriver, EventLoop, OnResult
from verl.agents.environments import load_environments, players_of_games
from verl.agents.episode import Episode, EpisodeError, EpisodeResult, EpisodeTask
from verl.agents.gateway.app import Gateway
from verl.agents.gateway.runner import command_limits, load_runner, plain
from verl.agents.images import EpisodeImages, content_text
from verl.agents.interactions import load_interactions
from verl.agents.journal import EPISODE, FOLDER, MAX_TEXT, PART, Journal
from verl.agents.loops import (
    AgentContext,
    AgentLoopBase,
    AgentLoopOutput,
    AsyncLLMServerManager,
    DictConfigWrap,
    checked_output,
    load_loops,
    loop_named,
)
from verl.agents.matches import Matches
from verl.agents.parsers import ToolParser
from verl.agents.recorded import packed_branch
from verl.agents.results import in_dtype, trained_share, untrained
from verl.agents.sandboxed import SandboxedFunctions
from verl.agents.tool_calls import ToolCalls, ToolResult, ToolSettings
from verl.config import full_key
from verl.config.active_keys import runner_of
from verl.data.dataset import RLHFDataset
from verl.data.images import image_encoder
from verl.data.schema import Messages
from verl.data_proto.columns import COLUMNS
from verl.data_proto.extras import media_of
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import SamplingParams
from verl.data_proto.token_ids import num_embeddings
from verl.data_proto.tokenizer import Tokenizer, listing_ids
from verl.data_proto.trajectory import Status, Trajectory
from verl.errors import ConfigError
from verl.rewards.outcome import RefusedResult, checked_number
from verl.rewards.sandbox.limits import Limits
from verl.rollout.api import RolloutEngine, Stats, require_reads
from verl.specs import AgentSpec
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import Record
from verl.tools.tool_registry import load_all_tools

log = logging.getLogger(__name__)

_AGENTS = full_key("rollout")
PYTHON = "pkg://verl.agents.tools.python"
REWARD_LISTS = ("turn_rewards", "turn_scores", "tool_rewards")  # of extra_fields


class Agents:
    """Episodes of one rank; `folder` is the run folder. Raises ConfigError for tools, loops or a template that cannot be
    used."""

    def __init__(
        self,
        spec: AgentSpec,
        tokenizer: Tokenizer,
        engine: RolloutEngine,
        *,
        stop_token_ids: Sequence[int],
        folder: Path | None = None,
        rank: int = 0,
    ):
        rollout = spec.rollout
        self.spec, self.tokenizer, self.engine = spec, tokenizer, engine
        self.loop_tokenizer = listing_ids(tokenizer)
        multi_turn, agent = rollout.multi_turn, rollout.agent
        self.loops = load_loops(agent.agent_loop_config_path)
        loop_named(self.loops, agent.default_agent_loop, f"{_AGENTS}.agent.default_agent_loop")
        tools = load_all_tools(multi_turn.tool_config_path, multi_turn.function_tool_path)
        interactions = load_interactions(multi_turn.interaction_config_path)
        environments = load_environments(agent.environment)
        self.num_players = players_of_games(spec, environments)
        runner = load_runner(runner_of(agent))  # its file may register a parser
        ToolParser.get_tool_parser(multi_turn.format, tokenizer)
        max_tokens = rollout.prompt_length + rollout.response_length
        encoder = image_encoder(tokenizer, spec.data) if engine.facts.reads_images else None
        self.images = EpisodeImages(encoder, None if folder is None else folder / FOLDER)
        continuity = ChatContinuity(tokenizer, spec.data.apply_chat_template_kwargs, max_tokens, self.images.tokens)
        self.journal = Journal(None if folder is None else folder / FOLDER, rank)
        self.events = EventLoop()
        self.pool = self._tool_pool(tools, None if folder is None else folder / "logs" / f"tools_rank_{rank}")
        settings = ToolSettings(
            multi_turn.tool_timeout_s, multi_turn.max_tool_response_length, multi_turn.tool_response_truncate_side
        )
        self.server_manager = AsyncLLMServerManager(self.images)
        self.context = AgentContext(
            spec,
            continuity,
            ToolCalls(tools, settings, self.journal, self.pool, self.images),
            frozenset(stop_token_ids),
            Matches(),
            environments,
            interactions,
            None if runner is None else self._gateway(rank),
            runner,
            command_limits(spec.limits, agent.runner_network) if isinstance(runner, list) else None,
            engine.facts.limits_requests,
        )
        self._notice_template(tools)
        filler = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
        self.driver = EpisodeDriver(
            engine,
            self.events,
            max_episodes=agent.max_episodes or 4 * rollout.max_num_seqs,
            timeout_s=agent.episode_timeout_s,
            filler=int(filler),
            num_retries=agent.num_retries,
        )
        self._results: list[EpisodeResult] = []
        self._tool_results: list[ToolResult] = []
        self._faults: Counter[str] = Counter()

    def _tool_pool(self, tools: Sequence[object], log_dir: Path | None) -> SandboxedFunctions | None:
        """The processes of tools that are functions, if the config has them sandboxed."""
        multi_turn = self.spec.rollout.multi_turn
        if multi_turn.tool_sandbox and any(isinstance(tool, FunctionTool) for tool in tools):
            return SandboxedFunctions(self.spec.limits, timeout_s=multi_turn.tool_timeout_s, log_dir=log_dir)
        if any(getattr(tool, "path", None) == PYTHON for tool in tools):
            raise ConfigError(
                f"{_AGENTS}.multi_turn.function_tool_path={PYTHON} runs programs of the model, which needs "
                f"{_AGENTS}.multi_turn.tool_sandbox=True."
            )
        return None

    def _gateway(self, rank: int) -> Gateway:
        """The endpoint for agents, started on the event loop."""
        agent = self.spec.rollout.agent
        port = agent.gateway_port + rank if agent.gateway_port else 0  # each rank of a machine needs a port
        gateway = Gateway(agent.gateway_host, port)
        self.events.start(gateway.start()).result()
        return gateway

    def generate(
        self,
        prompts: DataProto,
        params: SamplingParams,
        *,
        step: int,
        split: str,
        dtype: DTypeLike,
        on_finish: OnResult,
        limit: int | None = None,
        before: Sequence[Trajectory] | None = None,
    ) -> list[EpisodeResult]:
        """Generate `params.n` episodes of each prompt, ordered by (prompt, sample), of up to `limit` tokens each (None:
        params.max_new_tokens), with log-probs in `dtype`. An episode that samples params.max_new_tokens tokens before
        `limit` pauses; its trajectory can resume. With `before`, one for each row of `prompts`, these episodes continue
        under the `step` of their beginning. `on_finish` gets each finished episode."""
        # greedy samples, of ReMax or of validation, are one of each prompt
        if before is None and params.n % self.num_players:
            raise ConfigError(
                f"{_AGENTS}.agent.environment has games of {self.num_players} players, and the samples named {split!r} are "
                f"{params.n} of each prompt. Choose an advantage estimator without greedy samples, or set "
                f"{_AGENTS}.val_kwargs.also_greedy=False."
            )
        self.journal.begin(step)
        limit = limit or params.max_new_tokens
        rows = range(len(prompts))
        samples = (
            [(row, sample, None) for row in rows for sample in range(params.n)]
            if before is None
            else [(row, before[row].sample, before[row]) for row in rows]
        )
        tasks = self._tasks(prompts, samples, params, step=step, split=split, limit=limit)
        results = self.driver.run(
            tasks,
            partial(self._run_episode, params=params),
            replace(params, max_new_tokens=limit),
            step=step,
            on_finish=partial(self._finished, dtype, on_finish),
        )
        self.journal.sync()
        results = [in_dtype(result, dtype) for result in results]
        self._results += results
        return results

    def _tasks(
        self,
        prompts: DataProto,
        samples: Sequence[tuple[int, int, Trajectory | None]],
        params: SamplingParams,
        *,
        step: int,
        split: str,
        limit: int,
    ) -> list[EpisodeTask]:
        """The tasks of `samples`: (row of `prompts`, sample, trajectory so far)."""
        ordinals = prompts.batch["ordinal"].tolist()
        objects = prompts.non_tensor_batch
        media = media_of(prompts) or [None] * len(prompts)
        require_reads(self.engine, any(media))
        task_fields = ("prompt_token_ids", "media")
        names = [n for n in objects if n not in task_fields and (n not in COLUMNS or COLUMNS[n].producer != "rollout")]
        return [
            EpisodeTask(
                ordinal=ordinals[row],
                sample=sample,
                step=step,
                split=split,
                prompt_ids=tuple(objects["prompt_token_ids"][row]),
                row={name: objects[name][row] for name in names},
                limit=limit,
                max_prompt_length=self.spec.rollout.prompt_length,
                part=params.max_new_tokens if params.max_new_tokens < limit else None,
                so_far=so_far,
                stop_token_ids=self.context.stop_token_ids,
                vocab_size=num_embeddings(self.tokenizer),
                media=media[row],
                image_marks=self.images.marks,
            )
            for row, sample, so_far in samples
        ]

    def metrics(self) -> Stats:
        """Statistics of the episodes since the last call, for the log."""
        results, tools, faults = self._results, self._tool_results, self._faults
        self._results, self._tool_results, self._faults = [], [], Counter()
        num_paused = sum(is_paused(result) for result in results)
        stats: Stats = {
            **self.driver.stats,
            "num_episodes": len(results) - num_paused,
            "num_paused_episodes": num_paused,
        }
        stats |= trained_share(results)
        stats["num_failed_episodes"] = sum(result.error is not None for result in results)
        stats["num_tool_calls"] = len(tools)
        stats["num_failed_tool_calls"] = sum(result.error is not None for result in tools)
        stats["num_unreadable_tool_calls"], stats["num_tool_calls_not_run"] = faults["unreadable"], faults["not_run"]
        stats["num_replayed_tool_calls"] = sum(result.replayed for result in tools)
        stats["tool_s"] = sum(result.seconds for result in tools if not result.replayed)
        return stats

    def close(self) -> None:
        """End the endpoint, the event loop, the journal and the processes of tools."""
        if self.context.gateway is not None and self.events.thread.is_alive():
            if (close := getattr(self.context.runner, "aclose", None)) is not None:
                self.events.start(close()).result()
            self.events.start(self.context.gateway.stop()).result()
        self.events.close()
        self.journal.close()
        if self.pool is not None:
            self.pool.close()

    # -- one episode

    async def _run_episode(self, episode: Episode, *, params: SamplingParams) -> EpisodeResult:
        task = episode.task
        name = task.row.get("agent_name") or self.spec.rollout.agent.default_agent_loop
        cls, more = loop_named(self.loops, name, "agent_name")
        loop = self._loop(cls, more)
        sampling = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k, "logprobs": True}
        output = await loop.run(sampling, **task.row)
        outputs = [checked_output(one) for one in (output if isinstance(output, list) else [output])]
        outputs.sort(key=lambda one: -sum(one.response_mask))  # the longest is the episode's row
        if len(outputs) != 1 and (not outputs or self.spec.rollout.agent.branches != "all"):
            raise EpisodeError(
                f"its loop returned {len(outputs)} sequences, and one trains. Set {_AGENTS}.agent.branches=all"
            )
        return self._result(episode, *outputs)

    def _loop(self, cls: type[AgentLoopBase], more: dict[str, Any]) -> AgentLoopBase:
        return cls(
            trainer_config=DictConfigWrap(self.spec.config, self.context),
            server_manager=self.server_manager,
            tokenizer=self.loop_tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(self.spec.data),
            **more,
        )

    def _result(self, episode: Episode, output: AgentLoopOutput, *further_outputs: AgentLoopOutput) -> EpisodeResult:
        if not output.response_ids:
            raise EpisodeError("its response has no tokens")
        last = output.response_ids[-1]
        is_full = len(output.response_ids) >= episode.task.limit
        # "length" asks an asynchronous run to continue a response, so only a full one may say so
        status: Status = "length" if is_full and last not in self.context.stop_token_ids else "stop"
        trajectory = episode.trajectory(output.prompt_ids, output.response_ids, output.response_mask, status)
        trajectory.messages = episode.messages
        if len(trajectory.prompt_ids) > episode.task.max_prompt_length:
            raise EpisodeError(
                f"its prompt has {len(trajectory.prompt_ids)} tokens, more than "
                f"data.max_prompt_length={episode.task.max_prompt_length} allows"
            )
        reward, fields = self._checked_rewards(output.reward_score, dict(output.extra_fields))
        num_turns = sum(s.source == "policy" for s in trajectory.segments)
        if len(turn_rewards := fields.get("turn_rewards") or []) > num_turns:
            raise EpisodeError(f"its turn_rewards has {len(turn_rewards)} numbers for {num_turns} turns that train")
        trains_all = self.spec.rollout.agent.branches == "all"
        if self.spec.rollout.agent.mask_unfinished_episodes and not fields.get("finished", status != "length"):
            trajectory, trains_all = untrained(trajectory), False
        further = [
            episode.trajectory(one.prompt_ids, one.response_ids, one.response_mask, "stop") for one in further_outputs
        ] or episode.further(trajectory)
        scores = fields.get("reward_scores") or {
            name: fields[name] for name in ("turn_scores", "tool_rewards") if fields.get(name)
        }
        extra = {**fields, **dict(fields.get("tool_extra_fields") or {})}
        # as JSON holds it: a resumed run reads it from the journal
        extra = plain({**extra, "num_turns": output.num_turns, "rollout_reward_scores": scores})
        times = output.metrics.model_dump() if isinstance(output.metrics, Record) else dict(output.metrics)
        self._tool_results += episode.tool_results
        self._faults += episode.faults
        times |= {"generate_sequences": episode.generate_s, "num_tool_calls": len(episode.tool_results)}
        return EpisodeResult(
            episode.task, trajectory, reward, extra, output.num_turns, times,
            branches=further if trains_all else [], conversations=[one.messages for one in further],
            num_sampled=sum(sum(branch.sampled) for branch in episode.branches),
        )  # fmt: skip

    def _checked_rewards(self, reward: Any, fields: dict[str, Any]) -> tuple[float | None, dict[str, Any]]:
        """An episode's rewards from all sources as numbers. Raises EpisodeError for a reward that no scorer could return."""
        limits = Limits(max_abs_score=self.spec.limits.max_abs_score)
        try:
            for name in [name for name in REWARD_LISTS if fields.get(name) is not None]:
                fields[name] = [checked_number(float(value), name, limits) for value in fields[name]]
            checked_number(sum(fields.get("turn_rewards") or []), "sum of turn_rewards", limits)
            return None if reward is None else checked_number(float(reward), "reward", limits), fields
        except RefusedResult as refused:
            raise EpisodeError(f"it {refused}") from None

    def _finished(self, dtype: DTypeLike, on_finish: OnResult, result: EpisodeResult) -> None:
        self._write(result)
        if not is_paused(result):
            on_finish(in_dtype(result, dtype))

    def _write(self, result: EpisodeResult) -> None:
        task, prompt_ids = result.task, tuple(result.trajectory.prompt_ids)
        prompt: dict[str, object] = {} if prompt_ids == task.prompt_ids else {"prompt_ids": list(prompt_ids)}
        if media := [[s.start, s.length, s.media.digest] for s in result.trajectory.media]:
            prompt["media"] = media
        if is_paused(result):
            self.journal.write(PART, split=task.split, episode=task.name, **prompt)
            return
        self.journal.write(
            EPISODE,
            split=task.split,
            episode=task.name,
            **prompt,
            messages=_shown(result.trajectory.messages),
            **({"conversations": list(map(_shown, result.conversations))} if result.conversations else {}),
            **({"branches": list(map(packed_branch, result.branches))} if result.branches else {}),
            num_turns=result.num_turns,
            reward=result.reward,
            extra=result.extra,
            metrics=plain(result.metrics),
            error=result.error,
        )

    def _notice_template(self, tools: Sequence[Any]) -> None:
        multi_turn = self.spec.rollout.multi_turn
        schemas = [tool.tool_schema.for_template() for tool in tools]
        if schemas and not self.context.continuity.shows_tools(schemas):
            log.warning(
                "The chat template does not write tools into the prompt, so the model reads nothing of them. Describe "
                f"them in the prompts, or set {full_key('model.custom_chat_template')}."
            )
        if multi_turn.tokenization_sanity_check_mode == "disable":
            return
        if rewrite := self.context.continuity.rewriting():
            log.warning(
                "The chat template renders earlier turns otherwise once others follow: %r becomes %r. Episodes continue "
                "on the tokens that were sampled, without rewriting.",
                rewrite.before, rewrite.after,
            )  # fmt: skip


def _shown(messages: Messages) -> list[dict[str, object]]:
    """Messages as the journal has them."""
    return [{**m, "content": content_text(m.get("content"))[:MAX_TEXT]} for m in messages]


def is_paused(result: EpisodeResult) -> bool:
    """Whether the episode continues under the next weights."""
    return result.error is None and result.trajectory.can_resume(result.task.limit)
