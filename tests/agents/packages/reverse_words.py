import verifiers.v1 as vf


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def vowels(self, trace: vf.Trace) -> float:
        return sum(c in "aeiou" for c in trace.last_reply) / max(len(trace.last_reply), 1)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ReverseConfig(vf.TasksetConfig):
    num_tasks: int = 12


class ReverseTaskset(vf.Taskset[ReverseTask, ReverseConfig]):
    def load(self):
        words = ["abc", "hello", "tree", "moon"]
        for i in range(self.config.num_tasks):
            word = words[i % 4] + str(i)
            yield ReverseTask(
                ReverseData(prompt=f"Reverse {word}", answer=word[::-1], system_prompt="Be short."), self.config.task
            )


__all__ = ["ReverseTaskset"]
