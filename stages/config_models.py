"""The models of the configuration, one class for each stage that makes one: defaults, bounds, explanations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from stages.config_base import Fraction, Rewards, Section
from stages.sources import is_model


class Architecture(Section):
    """A Llama from random weights."""

    vocab_size: PositiveInt = 1024
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 384
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    context: PositiveInt = 128
    """Longest prompt plus response, in tokens."""
    init_std: PositiveFloat = 0.05
    """Of the random weights."""
    embedding_std: PositiveFloat = 0.3
    """Of the random embeddings: words must be told apart from the first step on, or copying from the prompt is learned late."""

    @model_validator(mode="after")
    def _heads_divide(self):
        if self.hidden_size % self.heads:
            raise ValueError(f"heads: {self.heads} does not divide hidden_size {self.hidden_size}")
        return self


class Optimizer(Section):
    """AdamW with linear warm-up; the trainer divides by the step's own count of tokens or rows."""

    learning_rate: PositiveFloat = 1e-3
    batch_size: PositiveInt = 64
    """Rows in one optimizer step, over all ranks and micro-batches."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: Fraction = 0.05
    """Part of all steps with a rising learning rate."""
    floor: Fraction = 0.1
    """Where the schedule ends, as a part of learning_rate."""
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _options_are_read(self):
        if self.schedule == "constant" and self.changed("floor"):
            raise ValueError("floor: not read by schedule: constant; take it out")
        return self


class Trained(Section):
    """What every trained model has."""

    seed: int = 0
    """Seed of the row order and of new weights."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of weights and arithmetic; gradients and optimizer stay float32."""
    save_every: PositiveInt = 100
    """Optimizer steps between two resumable states; not part of any identity."""
    save_minutes: PositiveFloat = 10.0
    """Minutes between two resumable states, should that be sooner; not part of any identity."""


class Import(Section):
    """A model from a folder or a hub instead of one made here."""

    stage: Literal["import"] = "import"
    source: str = Field(alias="from")
    """Hugging Face name or folder; its tokenizer must have a chat template, or be given one."""
    revision: str | None = None
    template: str | None = None
    """File with a chat template (Jinja) that takes the place of the tokenizer's own."""
    pad_token: str | None = None
    """A token of the vocabulary to pad with, where the tokenizer names none or pads with end-of-text; none: a reserved one is
    looked for."""


class Pretrain(Trained):
    """A BPE tokenizer and a small Llama, trained from random weights on plain texts and chat-formatted demonstrations."""

    stage: Literal["pretrain"]
    data: str
    """Plain texts; one of several lines is a conversation: user, assistant, and what is said of it after the end of text."""
    demonstrations: str | None = None
    """Demonstrations mixed in, in chat form, so that the base model has seen the template."""
    architecture: Architecture = Architecture()
    epochs: PositiveInt = 1
    optimizer: Optimizer = Optimizer(learning_rate=3e-3)


class SFT(Trained):
    """Supervised fine-tuning on demonstrations; only response tokens are trained, end-of-text included."""

    stage: Literal["sft"]
    base: str = Field(alias="from")
    data: str
    epochs: PositiveInt = 1
    optimizer: Optimizer = Optimizer()


class RewardModel(Trained):
    """Bradley-Terry on preference pairs; reads the last token; stores its mean and standard deviation."""

    stage: Literal["reward_model"]
    base: str = Field(alias="from")
    data: str
    heldout: str
    """Preferences that it is not trained on; its accuracy and the normaliser's statistics come from them."""
    margin: bool = False
    """Read the data's `margin` column: by how much the chosen response should win (Llama 2)."""
    epochs: PositiveInt = 1
    optimizer: Optimizer = Optimizer()


class Sampling(Section):
    temperature: PositiveFloat = 1.0
    """Also divides the logits in every log-probability that training takes."""
    max_tokens: PositiveInt = 40
    """Longest response; one that reaches it without end-of-text counts as truncated."""


class DPO(Trained):
    """Direct preference optimisation and its relatives; the reference's log-probabilities are made once and kept."""

    stage: Literal["dpo"]
    base: str = Field(alias="from")
    """The policy's start, and the frozen reference."""
    data: str
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: DPO; with label_smoothing cDPO, or robust DPO. `ipo`: squared distance to 1 / (2 beta)."""
    beta: PositiveFloat = 0.1
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """Assumed share of wrong labels (cDPO)."""
    robust: bool = False
    """Take the flipped pairs away instead of mixing them in (robust DPO); needs label_smoothing."""
    average_logprobs: bool = False
    """Log-probabilities per token instead of per response: the same beta is then another strength; the field disagrees on IPO's."""
    epochs: PositiveInt = 1
    optimizer: Optimizer = Optimizer(learning_rate=5e-4)

    @model_validator(mode="after")
    def _options_are_read(self):
        if self.loss == "ipo" and (self.label_smoothing or self.robust):
            raise ValueError("label_smoothing and robust are not read by the ipo loss; take them out or set loss: sigmoid")
        if self.robust and not self.label_smoothing:
            raise ValueError("robust: needs label_smoothing above 0")
        return self


class KTO(Trained):
    """Kahneman-Tversky optimisation on single rated responses; pairs are split into a desirable and an undesirable one."""

    stage: Literal["kto"]
    base: str = Field(alias="from")
    """The policy's start, and the frozen reference."""
    data: str
    """Rated responses (kind `rated`), or preferences, which are split."""
    beta: PositiveFloat = 0.1
    desirable_weight: PositiveFloat = 1.0
    undesirable_weight: PositiveFloat = 1.0
    """The paper wants desirable_weight * desirable rows / (undesirable_weight * undesirable rows) within 1 and 4/3."""
    epochs: PositiveInt = 1
    optimizer: Optimizer = Optimizer(learning_rate=5e-4)


class Sampled(Trained):
    """What methods share that sample from the policy and let a reward model choose."""

    base: str = Field(alias="from")
    reward: Rewards
    prompts: str
    rounds: PositiveInt = 1
    """Each round samples from the policy that the round before left."""
    prompts_per_round: PositiveInt = 1024
    samples_per_prompt: int = Field(8, ge=2)
    sampling: Sampling = Sampling()
    epochs: PositiveInt = 1


class RejectionSampling(Sampled):
    """RAFT: sample, score, keep the best finished response of each prompt, fine-tune on it."""

    stage: Literal["rejection_sampling"]
    top_share: Fraction | None = Field(None, gt=0.0)
    """Keep this share of all finished responses, the best, whatever prompt they answer; none: the best of each prompt."""
    optimizer: Optimizer = Optimizer(learning_rate=5e-4)


class IterativeDPO(Sampled):
    """A round: sample, score, pair the best with the worst finished response of each prompt, DPO."""

    stage: Literal["iterative_dpo"]
    beta: PositiveFloat = 0.1
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """Assumed share of wrong labels (cDPO)."""
    reference: Literal["fixed", "last"] = "last"
    """`fixed`: the model that the first round starts from; `last`: the policy that the round starts from."""
    optimizer: Optimizer = Optimizer(learning_rate=5e-4)


class ConditionalSFT(Trained):
    """Demonstrations labelled by a reward model, trained with the label in the prompt; asked for the wanted one."""

    stage: Literal["conditional_sft"]
    base: str = Field(alias="from")
    reward: str
    data: str
    condition: str = "{prompt} {level}"
    """How a prompt names the level."""
    levels: int = Field(5, ge=2, le=9)
    """The reward model's scores are cut into so many equally large groups, 1 the worst."""
    epochs: PositiveInt = 1
    optimizer: Optimizer = Optimizer()

    @model_validator(mode="after")
    def _condition_has_both(self):
        if "{prompt}" not in self.condition or "{level}" not in self.condition:
            raise ValueError("condition: must hold {prompt} and {level}")
        return self


class PPO(Trained):
    """Proximal policy optimisation: rollouts -> experience -> update, once per iteration; with a critic or without one."""

    stage: Literal["ppo"]
    base: str = Field(alias="from")
    """The policy's start, and the frozen reference."""
    reward: Rewards
    """A reward model, a list of sources, or source -> weight (helpful and harmless, say): a model of the graph, a Python
    function `file.py:function`, a service `http://...`. Weighted scores are added; each source keeps its column."""
    prompts: str
    iterations: PositiveInt = 8
    """Not part of the identity: raising it extends the same folder."""
    keep_optimizers: PositiveInt | None = None
    """How many finished iterations keep the optimizer's state on disk while the run goes on: the largest files, read only to go
    on from that iteration. None: all, until `rlhf gc`. Not part of the identity."""
    horizon: PositiveInt = 8
    """Iterations over which the learning rates fall; after it they stay at their floor."""
    prompts_per_iteration: PositiveInt = 256
    samples_per_prompt: PositiveInt = 1
    sampling: Sampling = Sampling()
    epochs: PositiveInt = 2
    """Passes over one iteration's experience. One epoch of one batch without a clip, with lam 1, is A2C."""
    actor: Optimizer = Optimizer(learning_rate=5e-4)
    """The paper has 5e-7 for the actor and 9e-6 for the critic, at 7 billion parameters."""
    critic: Optimizer = Optimizer(learning_rate=1e-3)
    critic_init: Literal["reward", "policy"] = "reward"
    """The critic starts from the first reward model, or from the policy with a new head; it never shares weights with the actor."""
    frozen_steps: NonNegativeInt = 0
    """Optimizer steps for which only the critic learns (the actor's rate is 0)."""
    estimator: Literal["gae", "reinforce", "reinforce_pp", "rloo", "grpo", "dr_grpo"] = "gae"
    """Advantages: by a critic (`gae`); without one: return less the iteration's mean (`reinforce`), discounted return to go
    normalised over the iteration (`reinforce_pp`, REINFORCE++), or a prompt's samples against each other."""
    filter_groups: bool = False
    """Dynamic filtering: leave out prompts whose samples all have the same reward (they carry no signal)."""
    kl_coef: NonNegativeFloat = 0.03
    """Weight of the per-token KL to the reference inside the reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_target: PositiveFloat | None = None
    """Adaptive: kl_coef is only the start, and moves until the KL of a response is this many nats (Ziegler et al.)."""
    kl_horizon: PositiveFloat = 10000.0
    """Responses over which an adaptive coefficient may change by about a fifth."""
    kl_loss_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference as a term of the actor's loss."""
    kl_loss_estimator: Literal["k2", "k3"] = "k3"
    """k1 is not offered here: its gradient has nothing to do with the KL."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the policy's entropy, a bonus in the actor's loss."""
    reward_normalisation: Literal["model", "running", "none"] = "model"
    """`model`: by the mean and spread stored with each reward model; `running`: by those of all rollouts so far; `none`."""
    reward_clip: PositiveFloat = 10.0
    """Normalised scores are cut to plus and minus this."""
    truncation_penalty: NonNegativeFloat = 1.0
    """Subtracted from the normalised score of a response that did not end by itself; no end of text is forced onto it."""
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    clip_low: Fraction = 0.2
    clip_high: PositiveFloat = 0.2
    """Clip-higher (DAPO): more room for tokens that become likelier."""
    dual_clip: float | None = Field(None, gt=1.0)
    """Limit of the loss where the advantage is negative, in units of it (Ye et al. 2020); none: no limit."""
    value_clip: PositiveFloat | None = 0.5
    """Most that a value may move from its old one, in units of reward; none: no clip."""
    whiten_advantages: bool = True
    """Zero mean and unit variance over all response tokens of the iteration, of all ranks."""
    engine_correction: Literal["none", "tis", "icepop", "sequence"] = "none"
    """Weights for what the engine sampled a little off the trainer's policy: truncated, dropped outside the range, by sequence."""
    engine_range: tuple[NonNegativeFloat, PositiveFloat] = (0.5, 2.0)
    """Range of those weights."""
    stop_at_kl: PositiveFloat | None = None
    """The actor's epochs end early once a step's KL from the policy that sampled is above this, in nats a token."""
    ptx_data: str | None = None
    """Demonstrations or texts whose likelihood is mixed in (PPO-ptx, InstructGPT): each actor step takes batch_size of them."""
    ptx_coef: NonNegativeFloat = 0.0
    """Weight of their loss, a mean over their trained tokens, beside the policy loss, a mean over the step's response tokens."""
    ema_decay: Fraction | None = None
    """Keep a moving average of the actor over iterations, `ema/` beside `model/`: ema = decay * ema + (1 - decay) * actor."""

    @model_validator(mode="after")
    def _options_are_read(self):
        if self.estimator != "gae":
            names = ["critic", "critic_init", "lam", "value_clip", *(["gamma"] if self.estimator != "reinforce_pp" else [])]
            unread = self.changed(*names)
            if unread:
                raise ValueError(f"{unread[0]}: not read by estimator {self.estimator}, which has no critic; take it out")
        if self.estimator == "reinforce_pp" and not self.whiten_advantages:
            raise ValueError("whiten_advantages: reinforce_pp is normalised by definition; take it out, or choose reinforce")
        if self.kl_target is not None:
            if not self.kl_coef:
                raise ValueError("kl_target: moves kl_coef by a factor, and 0 stays 0; give kl_coef a start")
            if self.kl_horizon <= self.prompts_per_iteration * self.samples_per_prompt / 5:
                raise ValueError("kl_horizon: within a fifth of an iteration's responses the coefficient could reach 0; make it longer")
        if (self.estimator in ("rloo", "grpo", "dr_grpo") or self.filter_groups) and self.samples_per_prompt < 2:
            what = "filter_groups" if self.filter_groups else f"estimator {self.estimator}"
            raise ValueError(f"samples_per_prompt: {what} compares a prompt's samples; give 2 or more")
        for option, needed in _NEEDS.items():
            if self.changed(option) and not self.changed(needed):
                raise ValueError(f"{option}: not read without {needed}; set that too, or take it out")
        if self.ptx_coef and not self.ptx_data:
            raise ValueError("ptx_data: ptx_coef mixes in demonstrations; name a data set")
        if not self.engine_range[0] < self.engine_range[1]:
            raise ValueError("engine_range: the first must be below the second")
        if self.reward_normalisation == "model" and not any(is_model(name) for name in self.reward):
            raise ValueError("reward_normalisation: functions and services store no mean and spread; choose running or none")
        if self.estimator == "gae" and self.critic_init == "reward" and not any(is_model(name) for name in self.reward):
            raise ValueError("critic_init: there is no reward model to start the critic from; choose policy")
        return self


_NEEDS = {
    "kl_horizon": "kl_target", "kl_loss_estimator": "kl_loss_coef", "engine_range": "engine_correction", "ptx_data": "ptx_coef",
}  # fmt: skip


def _tag(value: Any) -> str:
    if isinstance(value, dict):
        return value.get("stage", "import" if "from" in value else "missing")
    return value.stage


Model = Annotated[
    Annotated[Import, Tag("import")]
    | Annotated[Pretrain, Tag("pretrain")]
    | Annotated[SFT, Tag("sft")]
    | Annotated[RewardModel, Tag("reward_model")]
    | Annotated[DPO, Tag("dpo")]
    | Annotated[KTO, Tag("kto")]
    | Annotated[RejectionSampling, Tag("rejection_sampling")]
    | Annotated[IterativeDPO, Tag("iterative_dpo")]
    | Annotated[ConditionalSFT, Tag("conditional_sft")]
    | Annotated[PPO, Tag("ppo")],
    Discriminator(_tag),
]


STAGES = {
    "import": Import, "pretrain": Pretrain, "sft": SFT, "reward_model": RewardModel, "dpo": DPO, "kto": KTO,
    "rejection_sampling": RejectionSampling, "iterative_dpo": IterativeDPO, "conditional_sft": ConditionalSFT, "ppo": PPO,
}  # fmt: skip
POLICIES = tuple(stage for stage in STAGES if stage != "reward_model")
