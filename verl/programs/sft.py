"""Supervised fine-tuning: the mean loss over the trained tokens of the global batch."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial

from verl.algorithms.sft_losses import SFT_LOSSES
from verl.config.roots.sft import SFTConfig
from verl.data.conversations.dataset import ConversationDataset, load_conversations
from verl.data.files import Files
from verl.data_proto.tokenizer import Tokenizer
from verl.engines.api import BatchTotals
from verl.models.load import eos_token_ids_of
from verl.programs.given_rows import GivenRowsProgram, line_of_step, with_held_out
from verl.roles.api import Objective
from verl.roles.guards import StepGuard
from verl.roles.objectives.nll import TokenObjective
from verl.roles.objectives.terms import aggregate

_OUTPUTS = {"log_probs": "log_probs", "correct": "correct", "entropy": "entropy"}


class SFT(GivenRowsProgram[SFTConfig]):
    """Metrics in addition to GivenRowsProgram's: train/{token_accuracy,entropy}, and train/nll with another loss. A validation
    has val/ of these and of the loss, means over the trained tokens of all validation rows."""

    console_metrics = line_of_step({"token_accuracy": "accuracy"})
    labels = {"loss": "held-out loss", "token_accuracy": "held-out token accuracy"}
    always = ("loss", "token_accuracy")
    ends_with_checkpoint = True  # as the trainer of existing releases
    schedule = dict.fromkeys(("validation", "checkpoints"), "at the end")
    curves = {
        "loss": with_held_out("loss"),
        "token accuracy": with_held_out("token_accuracy"),
        "entropy (nats)": with_held_out("entropy"),
        "learning rate": {"train/lr": ""},
    }

    @classmethod
    def load_rows(cls, config: SFTConfig, files: Files, tokenizer: Tokenizer, **selects: object) -> ConversationDataset:
        stops = eos_token_ids_of(config.model, tokenizer)
        return load_conversations(files, tokenizer, config.data, stop_token_ids=stops, **selects)

    @classmethod
    def objective(cls, config: SFTConfig) -> Callable[[StepGuard], Objective]:
        return partial(TokenObjective, config.sft.loss)

    def loss_name(self) -> str:
        return f"{self.config.sft.loss}, mean over the trained tokens of {self.config.data.train_batch_size} rows"

    def validate(self, step: int) -> dict[str, float]:
        assert self.data.validation is not None
        kinds = {"loss": self.config.sft.loss} | ({"nll": "nll"} if self.config.sft.loss != "nll" else {})
        total, num_trained = aggregate("token-sum", 1.0, BatchTotals(0, 0, 0)), 0
        sums = defaultdict[str, float](float)
        for batch in map(self.data.validation.batch, self.held_out()):
            columns, mask = self.model.forward(batch, _OUTPUTS).get().batch, batch.batch["response_mask"]
            log_probs, correct, entropy = (columns[name].double() for name in _OUTPUTS)
            values = {name: SFT_LOSSES[kind](log_probs, mask, total) for name, kind in kinds.items()}
            values |= {"token_accuracy": total(correct, mask), "entropy": total(entropy, mask)}
            for name, value in values.items():
                sums[name] += float(value)
            num_trained += int(mask.sum())
        return {f"val/{name}": value / num_trained for name, value in sums.items()}
