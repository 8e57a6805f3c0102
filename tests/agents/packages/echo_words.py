import verifiers.v1 as vf


class EchoState(vf.State):
    num_calls: int = 0


class EchoTools(vf.Toolset[vf.ToolsetConfig, EchoState]):
    TOOL_PREFIX = None

    @vf.tool
    def echo(self, text: str) -> str:
        """Say a text again."""
        self.state.num_calls += 1
        return f"You said {text}."


class EchoConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class EchoTask(vf.Task[vf.TaskData, EchoState, EchoConfig]):
    @classmethod
    def toolsets(cls, config):
        return [EchoTools(config.tools)]

    @vf.reward
    async def calls(self, trace: vf.Trace) -> float:
        return float(trace.state.num_calls)


class EchoTasksetConfig(vf.TasksetConfig):
    task: EchoConfig = EchoConfig()


class EchoTaskset(vf.Taskset[EchoTask, EchoTasksetConfig]):
    def load(self):
        return [EchoTask(vf.TaskData(prompt=f"Echo {i}"), self.config.task) for i in range(8)]


__all__ = ["EchoTaskset"]

if __name__ == "__main__":
    EchoTools.run()
