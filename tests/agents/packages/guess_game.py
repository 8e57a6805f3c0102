import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    pass


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        turns = 0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                turns += 1
                if str(task.data.number) in segment.last_reply or turns == 3:
                    break
                segment = await interaction.turn("No. Guess again.")
        interaction.trace.record_reward("turns", 1.0 / turns)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        i = 0
        while True:
            yield GuessTask(GuessData(prompt="Guess a number from 1 to 9.", number=1 + i % 9), self.config.task)
            i += 1


__all__ = ["GuessTaskset", "GuessEnv"]
