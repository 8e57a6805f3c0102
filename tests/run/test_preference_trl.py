"""Loss, rewards, gradient norm and the other metrics of ten steps equal TRL's trainers' on the same batches."""

import pytest

from tests.data.conversations.templates import chat
from tests.run.test_sft_trl import words
from tests.run.trl_oracle import paired_steps, trl_case
from verl.config.active_keys import LABELLED_LOSSES
from verl.families import PREFERENCE_LOSSES, REFERENCE_COLUMNS
from verl.models.tiny import make_tiny_model


def pair(i):
    return {
        "prompt": words(i, i % 4 + 1),
        "chosen": " " + words(i + 2, i % 6 + 1),
        "rejected": " " + words(i, i % 3 + 2),
    }


# TRL's log-probs have the line end that CHAT_TEMPLATE writes behind the last turn, and ours end where sampling ends. Under this
# template, which writes it before the next turn, both are of the same tokens.
TEMPLATE = (
    "{% for m in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)
PAIRS = [pair(i) for i in range(40)]
ROWS = {
    "pairs": PAIRS,
    "messages": [
        {
            "prompt": chat(row["prompt"]),
            "chosen": chat("", row["chosen"])[1:],
            "rejected": chat("", row["rejected"])[1:],
        }
        for row in PAIRS
    ],
    "labelled": [
        {"prompt": row["prompt"], "completion": row["chosen" if i % 3 else "rejected"], "label": i % 3 > 0}
        for i, row in enumerate(PAIRS)
    ],
}
DPO = [*(name for name in PREFERENCE_LOSSES.reading(*REFERENCE_COLUMNS) if name not in LABELLED_LOSSES), "sft"]


def case(trainer, loss, rows="pairs", theirs=None, **both):
    """(trainer, rows, arguments of TRL's config, our overrides); `both` are settings that have one name in both, or nearly."""
    names = {"f_divergence_type": "preference.f_divergence", "learning_rate": "optim.lr"}
    ours = [] if loss is None else [f"preference.loss={loss}"]
    ours += [f"{names.get(key, f'preference.{key}')}={str(value).replace(' ', '')}" for key, value in both.items()]
    return trainer, rows, {**(theirs or {}), **both}, ours


SIMPO = {"loss_type": "simpo", "cpo_alpha": 0.0}
SUM = {"loss_type": ["sigmoid", "bco_pair", "sft"]}
CASES = {
    **{f"DPO {name}": case("DPO", name, theirs={"loss_type": [name]}) for name in DPO},
    "DPO exo_pair": case("DPO", "exo_pair", theirs={"loss_type": ["exo_pair"]}, label_smoothing=1e-3),
    "DPO robust": case("DPO", "robust", theirs={"loss_type": ["robust"]}, label_smoothing=0.1),
    "DPO of messages": case("DPO", None, "messages"),
    "DPO, a sum of losses": case("DPO", "[sigmoid,bco_pair,sft]", theirs=SUM, loss_weights=[0.8, 0.2, 1.0]),
    **{f"DPO, {kind}": case("DPO", None, f_divergence_type=kind) for kind in ("js_divergence", "alpha_divergence")},
    "DPO, forward_kl": case("DPO", None, f_divergence_type="forward_kl", learning_rate=2e-5),
    "DPO discopop": case("DPO", "discopop", theirs={"loss_type": ["discopop"]}, learning_rate=2e-5),
    "DPO, length desensitized": case("DPO", None, ld_alpha=0.4),
    "DPO, weighted": case("DPO", None, use_weighting=True),
    "KTO": case("KTO", "kto", "labelled"),
    "KTO with weights": case("KTO", "kto", "labelled", desirable_weight=0.7, undesirable_weight=1.4, beta=0.3),
    "KTO apo_zero_unpaired": case("KTO", "apo_zero_unpaired", "labelled", {"loss_type": "apo_zero_unpaired"}),
    "CPO": case("CPO", "cpo", label_smoothing=0.1),
    "CPO hinge": case("CPO", "cpo_hinge", theirs={"loss_type": "hinge"}),
    "CPO ipo": case("CPO", "cpo_ipo", theirs={"loss_type": "ipo"}, cpo_alpha=0.5),
    "SimPO": case("CPO", "simpo", theirs=SIMPO, beta=2.0),
    "AlphaPO": case("CPO", "simpo", theirs=SIMPO, beta=2.0, alpha=0.1),
    "ORPO": case("ORPO", "orpo"),
}
# gradients whose weights are exponentials, or steep sigmoids, of log-ratios: sums of about 100 nats, whose spacing in float32
# is 8e-6, so that each side's weights are exact to about 1e-5
STEEP = {"DPO, forward_kl": 3e-5, "DPO discopop": 3e-5}
COMPARED = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "kl", "entropy", "nll_loss")
COMPARED += ("logps/chosen", "logps/rejected", "mean_token_accuracy", "log_odds_ratio", "log_odds_chosen")
LOGITS = ("logits/chosen", "logits/rejected")  # of DPO and KTO; TRL's CPO and ORPO average over prompts and padding too


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def cases(model):
    return {
        name: trl_case(model, ROWS[kind], TEMPLATE, 1e-4, trainer=trainer, args=args)
        for name, (trainer, kind, args, _) in CASES.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_match_trl(case, cases, theirs, tmp_path):
    overrides = CASES[case][-1]
    for row, log in paired_steps(theirs[case], "preference", tmp_path, cases[case], "float32", *overrides):
        where = f"{case}, step {row['step']}"
        assert row["train/loss"] == pytest.approx(log["loss"], rel=1e-5, abs=1e-6), where
        assert row["train/grad_norm"] == pytest.approx(log["grad_norm"], rel=STEEP.get(case, 1e-5)), where
        shared = [name for name in COMPARED if name in log and f"train/{name}" in row]
        if case == "DPO sft":  # TRL asks its reference all the same, and reports rewards against it
            shared = [name for name in shared if "rewards" not in name]
        assert "logps/chosen" in shared or "KTO" in case
        if case.startswith(("DPO", "KTO")):
            shared += [name for name in LOGITS if name in log]
            assert LOGITS[0] in shared
        for name in shared:
            # a difference of log-probabilities of about 100 nats, spaced by 8e-6 in float32
            spacing = 2e-5 if name == "kl" else 1e-5
            if name == "rewards/accuracies" and abs(log["rewards/margins"]) < 1e-5:
                continue  # the policy is the reference: rounding ranks the pairs
            assert row[f"train/{name}"] == pytest.approx(log[name], rel=1e-5, abs=spacing), f"{where}: {name}"
