"""The bridge against TRL, on Llama and GPT-2: the same prompts, rewards, log-probs, loss, gradient, and weights after a step.

tests/test_trl.py holds TRL against grpo_core on equal terms; here are the differences of real models: tokenizers, padding,
positions, several ends, micro-batches.
"""

import dataclasses
import gc
import itertools
import json
import zlib

import pandas as pd
import pytest
import torch

pytest.importorskip("trl", reason='needs pip install -e ".[real]"')

import trl
from accelerate.commands.launch import launch_command_parser
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_core import GRPOConfig, Problem, grpo_loss, sample_groups, token_log_probs, train
from grpo_core.bridge import trl_run
from grpo_core.bridge.causal_lm import CausalLM
from grpo_core.bridge.gsm8k import Splits
from grpo_core.bridge.text_task import TextTask
from grpo_core.studies import trl_side_by_side as study
from grpo_core.studies.trl_side_by_side import handing_out, one_step_each, quiet

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ENDS = ["<|end|>", "<|endoftext|>"]
WORDS = [*ENDS, "<|user|>", *"0123456789 #+-=QueryAnsw:?\n"]
CHAT = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
MIXED = [Problem("12+3?", "15"), Problem("4?", "4"), Problem("5+6+70?", "81")]
EQUAL = [Problem("12+3?", "15"), Problem("2+44?", "46")]
CONFIG = GRPOConfig(
    prompts_per_iteration=3, group_size=4, temperature=0.8, iterations=1, inner_epochs=1, learning_rate=0.3, beta=0.1,
    correction=1, max_new_tokens=6, max_grad_norm=1e9,
)  # fmt: skip
LOSS_TYPES = {"sequence": "grpo", "token": "dapo", "constant": "dr_grpo"}


class Graded(TextTask):
    """A verifier that random models can please: the reward of a completion is a number between 0 and 1, made of its text."""

    def verify(self, completion, answer):
        return zlib.crc32(f"{completion} {answer}".encode()) % 5 / 4


def tokenizer(chat=CHAT):
    ids = {word: i for i, word in enumerate(dict.fromkeys(WORDS))}
    characters = Tokenizer(models.WordLevel(ids, unk_token=" "))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token=ENDS[0], additional_special_tokens=WORDS[1:3], chat_template=chat
    )


def task_of(problems=MIXED, chat=CHAT, kind=Graded):
    return kind(tokenizer(chat), Splits(problems, problems, problems), (0, 1), CONFIG.max_new_tokens)


def llama(seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(set(WORDS)), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.3, bos_token_id=None, eos_token_id=[0, 1],
        )
    )  # fmt: skip


def gpt2(seed=0):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(set(WORDS)), n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3,
            resid_pdrop=0.1, bos_token_id=None, eos_token_id=[0, 1],
        )
    )  # fmt: skip


def sampled(model, problems=MIXED, seed=0, task=None):
    generator = torch.Generator().manual_seed(seed)
    return sample_groups(CausalLM(model), task or task_of(problems), problems, 4, CONFIG.temperature, None, generator)


def trainer_of(model, task, folder, rollout=None, config=CONFIG, **changes):
    quiet()
    model.save_pretrained(folder)
    parts = {} if rollout is None else {"rollout_func": handing_out(rollout)}
    config = dataclasses.replace(config, prompts_per_iteration=len(task.train))
    return trl_run.make_trainer(folder, task, config, folder, parts, shuffle_dataset=False, **changes)


def scored(rollout):
    """What `token_log_probs` scores."""
    return rollout.prompt_ids, rollout.completion_ids, rollout.temperature, rollout.prompt_mask


def rows_of(rollout):
    """What TRL scores: prompts and completions in one row, and the mask of both. Padding is 0."""
    mask = torch.ones_like(rollout.prompt_ids, dtype=torch.bool) if rollout.prompt_mask is None else rollout.prompt_mask
    return torch.cat([rollout.prompt_ids, rollout.completion_ids], 1), torch.cat([mask, rollout.completion_mask], 1).long()


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """accelerate collects garbage at the end of each training, which takes half a second with all that is imported here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# Prompts and rewards


@pytest.mark.parametrize("chat", [CHAT, None], ids=["chat", "no template"])
def test_prompts_and_rewards_are_those_of_the_task(tmp_path, chat):
    task = task_of(chat=chat, kind=TextTask)
    task.instruction = "Answer?"
    trainer = trainer_of(llama(), task, tmp_path)
    prompts, *_ = trainer._tokenize_prompts(list(trainer.train_dataset["prompt"]))
    assert prompts == [task.encode(problem.prompt) for problem in MIXED]
    completions = ["#### 15<|end|>", "#### 15<|endoftext|>", "#### 15", "#### 16<|end|>"]
    ids = [task.tokenizer.encode(text) for text in completions]
    assert trl_run.verifier(task)(completion_ids=ids, answer=["15"] * 4, prompts=[]) == [1.0, 1.0, 0.0, 0.0]
    assert trainer.eos_token_ids == [0, 1]


# Log-probs and positions


def trls_log_probs(trainer, rollout):
    ids, mask = rows_of(rollout)
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, rollout.completion_ids.shape[1])[0]


def largest(difference, mask):
    return torch.where(mask, difference, 0.0).abs().max().item()


@pytest.mark.parametrize(
    ("build", "problems"),
    [(llama, MIXED), (llama, EQUAL), (gpt2, EQUAL)],
    ids=["Llama, mixed lengths", "Llama, equal lengths", "GPT-2, equal lengths"],
)
def test_log_probs_are_trls(tmp_path, build, problems):
    model, rollout = build(), sampled(build(), problems)
    trls = trls_log_probs(trainer_of(model, task_of(problems), tmp_path), rollout)
    assert largest(trls - rollout.old_log_probs, rollout.completion_mask) < 1e-5
    assert rollout.old_log_probs[rollout.completion_mask].std() > 0.5


def test_trl_counts_the_padding_as_positions_for_gpt2(tmp_path):
    """It passes no positions, so the first row of each prompt begins as late as the longest one. For Llama nothing changes:
    its positions are rotary, and only differences of them matter."""
    model, rollout = gpt2(), sampled(gpt2())
    trls = trls_log_probs(trainer_of(model, task_of(), tmp_path), rollout)
    difference = torch.where(rollout.completion_mask, trls - rollout.old_log_probs, 0.0).abs().amax(dim=1).view(3, 4)
    assert difference[2].max() < 1e-5, "the longest prompt has no padding"
    assert difference[:2].min() > 0.01

    ids, mask = rows_of(rollout)
    logits = CausalLM(model)(ids, mask, torch.arange(ids.shape[1]).expand_as(ids))
    shifted = (logits[:, rollout.prompt_ids.shape[1] - 1 : -1] / CONFIG.temperature).log_softmax(-1)
    shifted = shifted.gather(-1, rollout.completion_ids[..., None]).squeeze(-1)
    assert largest(trls - shifted, rollout.completion_mask) < 1e-5, "our log-probs with those positions are TRL's"


def test_transformers_samples_from_the_positions_that_we_score(tmp_path):
    """So for GPT-2 and prompts of different lengths, TRL scores another policy than the one that sampled."""
    model, task = gpt2().eval(), task_of()
    rollout = sampled(model)
    trls = trls_log_probs(trainer_of(model, task, tmp_path), rollout)
    prompts, mask = rollout.prompt_ids[::4], rollout.prompt_mask[::4].long()
    step = model.generate(
        prompts, attention_mask=mask, do_sample=True, temperature=CONFIG.temperature, top_k=0, max_new_tokens=1,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    sampler = step.scores[0].log_softmax(-1).repeat_interleave(4, dim=0).gather(1, rollout.completion_ids[:, :1])
    assert (sampler - rollout.old_log_probs[:, :1]).abs().max() < 1e-5
    assert (sampler - trls[:, :1]).abs().max() > 0.01


def test_trl_scores_a_gpt2_row_by_what_else_is_in_the_batch(tmp_path):
    model, alone = gpt2(), sampled(gpt2(), MIXED[:1])
    trainer = trainer_of(model, task_of(), tmp_path)
    together = dataclasses.replace(
        alone,
        prompt_ids=torch.nn.functional.pad(alone.prompt_ids, (2, 0)),
        prompt_mask=torch.nn.functional.pad(torch.ones_like(alone.prompt_ids, dtype=torch.bool), (2, 0)),
    )
    pair = [trls_log_probs(trainer, rollout) for rollout in (alone, together)]
    assert largest(pair[0] - pair[1], alone.completion_mask) > 0.01
    ours = [
        token_log_probs(CausalLM(model), r.prompt_ids, r.completion_ids, r.temperature, r.prompt_mask)
        for r in (alone, together)
    ]
    assert largest(ours[0] - ours[1], alone.completion_mask) < 1e-5


# Loss and gradient


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """One trainer for each architecture; the tests change its settings in place, which is much faster than to make one."""
    return {build: trainer_of(build(), task_of(), tmp_path_factory.mktemp("trl"), sampled(build())) for build in (llama, gpt2)}


SETTINGS = list(itertools.product(LOSS_TYPES, (0.0, 0.3), (None, 0.28), ("std", "none")))


def trls_loss(trainer, rollout, stale, reference, config, corrected=False):
    """Loss and gradient of TRL's trainer on the rollout, with old log-probs of a policy that has moved on since."""
    trainer.rollout_func = handing_out(rollout)
    trainer.loss_type, trainer.beta = LOSS_TYPES[config.aggregation], config.beta
    trainer.epsilon_high = config.clip_eps if config.clip_eps_high is None else config.clip_eps_high
    trainer.scale_rewards = "group" if config.scale == "std" else "none"
    trainer.args.use_bias_correction_kl = corrected
    trainer.current_gradient_accumulation_steps = 1
    trainer.ref_model.load_state_dict(reference.state_dict())
    trainer.model.train()
    rows = [row for row in trainer.train_dataset for _ in range(4)][: len(rollout.texts)]
    inputs = trainer._generate_and_score_completions(rows) | {"old_per_token_logps": stale}
    return loss_and_gradient(trainer._compute_loss(trainer.model, inputs), trainer.model)


def loss_and_gradient(loss, model):
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([part.flatten() for part in parts])


def our_loss(model, rollout, reference, config):
    policy, frozen = CausalLM(model), CausalLM(reference)
    with torch.no_grad():
        ref_log_probs = token_log_probs(frozen, *scored(rollout))
    return loss_and_gradient(grpo_loss(token_log_probs(policy, *scored(rollout)), rollout, ref_log_probs, config)[0], model)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("build", "problems"), [(llama, MIXED), (gpt2, EQUAL)], ids=["Llama, mixed lengths", "GPT-2, equal lengths"]
)
def test_loss_and_gradient_are_trls_at_all_settings(trainers, build, problems, seed):
    trainer, model, reference, rollout = trainers[build], build(), build(seed=9), sampled(build(), problems, seed)
    trainer.train_dataset = trl_run.dataset(task_of(), problems)
    noise = torch.Generator().manual_seed(seed)
    stale = rollout.old_log_probs + 0.4 * torch.randn(rollout.old_log_probs.shape, generator=noise)
    stale_rollout = dataclasses.replace(rollout, old_log_probs=stale)
    losses = set()
    for aggregation, beta, clip_eps_high, scale in SETTINGS:
        config = dataclasses.replace(CONFIG, aggregation=aggregation, beta=beta, clip_eps_high=clip_eps_high, scale=scale)
        loss, gradient = our_loss(model, stale_rollout, reference, config)
        trls, trls_gradient = trls_loss(trainer, rollout, stale, reference, config)
        assert loss == pytest.approx(trls, abs=1e-5), config
        assert (gradient - trls_gradient).norm() < 1e-5 * gradient.norm(), config
        losses.add(round(loss, 6))
    assert len(losses) == len(SETTINGS), "each setting makes a difference here, so agreement means something"


def test_trls_correction_multiplies_k3_by_the_ratio_and_changes_the_gradient_even_at_ratio_1(trainers):
    """Its default since 1.16. The value of the loss is the same on fresh samples; where it points to is not."""
    model, reference, rollout = llama(), llama(seed=9), sampled(llama())
    trainers[llama].train_dataset = trl_run.dataset(task_of(), MIXED)
    plain, corrected = (
        trls_loss(trainers[llama], rollout, rollout.old_log_probs, reference, CONFIG, corrected) for corrected in (False, True)
    )
    assert plain[0] == pytest.approx(corrected[0], abs=1e-6)
    log_probs = token_log_probs(CausalLM(model), *scored(rollout))
    with torch.no_grad():
        d = token_log_probs(CausalLM(reference), *scored(rollout)) - log_probs
        k3 = d.exp() - d - 1
    weighted = torch.where(rollout.completion_mask, CONFIG.beta * k3 * log_probs, 0.0).sum() / rollout.completion_mask.sum()
    missing = loss_and_gradient(weighted, model)[1]  # The derivative of ratio · k3, less that of k3, where the ratio is 1.
    assert (corrected[1] - plain[1] - missing).norm() < 1e-4 * missing.norm()
    assert missing.norm() > 0.01 * plain[1].norm()


def test_population_std_is_a_longer_gradient_with_a_weaker_leash():
    """So TRL can come close to it: AdamW does not mind the length."""
    model, reference, rollout, factor = llama(), llama(seed=9), sampled(llama()), (4 / 3) ** 0.5
    population = our_loss(model, rollout, reference, dataclasses.replace(CONFIG, correction=0))[1]
    sample = our_loss(model, rollout, reference, dataclasses.replace(CONFIG, beta=CONFIG.beta / factor))[1]
    assert (population - factor * sample).norm() < 1e-3 * population.norm()


# Weights after real steps of TRL's trainer


CASES = {
    "Llama, mixed lengths": (llama, MIXED, {}),
    "Llama, mixed lengths, another seed": (llama, MIXED, {"seed": 5}),
    "Llama, two steps, clip-higher": (llama, MIXED, {"inner_epochs": 2, "clip_eps_high": 0.28}),
    "Llama, sequence, two steps": (llama, MIXED, {"aggregation": "sequence", "inner_epochs": 2}),
    "Llama, micro-batches": (llama, MIXED, {"micro_batch": 3, "inner_epochs": 2}),
    "Llama, sequence, micro-batches": (llama, MIXED, {"aggregation": "sequence", "micro_batch": 4}),
    "Llama, constant, no std, no leash": (llama, MIXED, {"aggregation": "constant", "scale": "none", "beta": 0.0}),
    "GPT-2, equal lengths, with dropout": (gpt2, EQUAL, {}),
    "GPT-2, sequence, two steps": (gpt2, EQUAL, {"aggregation": "sequence", "inner_epochs": 2, "seed": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_after_a_step_are_those_of_trls_trainer(case):
    build, problems, changes = CASES[case]
    config = dataclasses.replace(CONFIG, **changes)
    model, reference = build(config.seed), build(seed=9)
    step = one_step_each(model, task_of(problems), sampled(model, problems, config.seed), config, reference)
    assert step.moved > 1e-2 and step.distance < 2e-6, step
    if config.micro_batch is None:  # TRL's log averages the means of micro-batches.
        metrics = step.metrics.dropna()
        assert metrics["TRL"].to_numpy() == pytest.approx(metrics["grpo_core"].to_numpy(), abs=1e-5)
        assert len(metrics) == 4 + (config.beta > 0)
    assert "two steps" not in case or step.metrics["TRL"]["clip_fraction"] > 0, "the second step should reach the clip"


def test_weights_for_gpt2_and_mixed_lengths_are_not_trls():
    model = gpt2()
    step = one_step_each(model, task_of(), sampled(model), CONFIG, gpt2(seed=9))
    assert step.distance > 1e-3
    loss = step.metrics.loc["loss"]
    assert loss["TRL"] != pytest.approx(loss["grpo_core"], abs=1e-4)


def test_trls_bnpo_averages_the_means_of_micro_batches():
    """So it depends on how a batch is cut; `dapo`, its default, and `grpo_update` do not."""
    model, config = llama(), dataclasses.replace(CONFIG, micro_batch=3)
    rollout = sampled(model)
    pair = [one_step_each(model, task_of(), rollout, config, loss_type=name).distance for name in ("dapo", "bnpo")]
    assert pair[0] < 2e-6 and pair[1] > 1e-3


# Settings


def test_names_of_the_table_exist_in_trl_and_in_accelerate():
    table = trl_run.settings_table(CONFIG)
    start, *cells = table["TRL + accelerate"]
    names = [word.partition("=")[0] for cell in cells for word in cell.split()]
    assert sorted(names) == sorted(trl_run.trl_settings(CONFIG)), "each setting stands in the table once"
    assert set(names) <= {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    flags = [word.partition("=")[0] for word in start.split() if word.startswith("--")]
    assert set(flags) <= set(launch_command_parser()._option_string_actions)
    ours = {word.partition("=")[0] for cell in table["grpo_core"][1:] for word in cell.split()}
    assert ours == {field.name for field in dataclasses.fields(GRPOConfig)} - {"evaluate_every", "evaluate_on"}
    verl = [word.partition("=")[0] for cell in table["verl + Ray"][1:] for word in cell.split()]
    assert sorted(verl) == sorted(trl_run.verl_settings(CONFIG))


@pytest.mark.parametrize("change", [{"correction": 0}, {"std_eps": 1e-6}, {"kl": "k1"}, {"micro_batch": 5}], ids=str)
def test_what_trl_cannot_do_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change)) if "micro_batch" not in change else "must divide"):
        trl_run.trl_settings(dataclasses.replace(CONFIG, **change))


def test_what_does_not_matter_is_not_refused():
    config = dataclasses.replace(CONFIG, correction=0, std_eps=0.0, kl="k1", scale="none", beta=0.0)
    assert trl_run.trl_settings(config)["scale_rewards"] == "none"


def test_settings_for_two_processes_are_halves_of_those_for_one():
    one, two = (trl_run.trl_settings(dataclasses.replace(CONFIG, micro_batch=2), count) for count in (1, 2))
    assert one["gradient_accumulation_steps"] == one["steps_per_generation"] == 6
    assert two == one | {"gradient_accumulation_steps": 3, "steps_per_generation": 3}


def test_trls_defaults_are_those_that_the_study_names():
    defaults = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    expected = {"loss_type": "dapo", "beta": 0.0, "scale_rewards": "group", "num_iterations": 1, "use_bias_correction_kl": True}
    expected |= {"gradient_checkpointing": True, "disable_dropout": False, "learning_rate": 1e-6, "temperature": 1.0}
    assert {name: defaults[name] for name in expected} == expected


# The script


def test_script_trains_a_model_from_a_folder_on_a_file(tmp_path, capsys):
    for part in (llama(), tokenizer()):
        part.save_pretrained(tmp_path / "model")
    lines = [json.dumps({"question": f"{i}+{i}?", "answer": f"#### {2 * i}"}) + "\n" for i in range(1, 60)]
    (tmp_path / "train.jsonl").write_text("".join(lines[:50]))
    (tmp_path / "test.jsonl").write_text("".join(lines[50:]))
    config = dataclasses.replace(CONFIG, iterations=2, inner_epochs=2)
    run = trl_run.Run(str(tmp_path / "model"), str(tmp_path), output=tmp_path / "out", config=config)
    trl_run.main(run)
    assert "greedy accuracy before 0.0" in capsys.readouterr().out
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").num_parameters() == llama().num_parameters()


# The study


@pytest.fixture
def small_study(monkeypatch):
    """The study on a random Llama, with two iterations, three changes, and all runs in this process."""
    config = dataclasses.replace(CONFIG, prompts_per_iteration=2, iterations=2, learning_rate=1e-3, inner_epochs=2)
    changes = {
        name: study.CHANGES[name] for name in ("the paper", "num_iterations 2", "population std", "use_bias_correction_kl")
    }
    monkeypatch.setattr(study, "start", lambda: (llama(), task_of()))
    monkeypatch.setattr(study, "CONFIG", config)
    monkeypatch.setattr(study, "PAPER", dataclasses.replace(config, inner_epochs=1, aggregation="sequence"))
    monkeypatch.setattr(study, "CHANGES", changes)
    monkeypatch.setattr(study, "run_all", lambda function, jobs, processes=None: [function(*job) for job in jobs])
    return config


def test_our_side_of_the_race_is_train(small_study):
    policy = CausalLM(llama())
    history = train(task_of(), policy, dataclasses.replace(small_study, seed=3)).frame
    rows = [row for row in study.race(3) if row["side"] == "grpo_core"]
    assert [row["reward"] for row in rows[1:]] == history["reward"][1:].tolist()
    assert rows[-1]["accuracy"] == history["accuracy"].tolist()[-1]


def test_study_writes_its_tables_and_figures(small_study, tmp_path):
    study.write(tmp_path, range(2))
    curves, sides, changes = (pd.read_csv(tmp_path / f"{name}.csv") for name in ("curves", "sides", "changes"))
    assert curves.groupby(["side", "seed"]).size().tolist() == [3] * 4
    assert curves[curves["iteration"] > 0][["reward", "milliseconds"]].notna().all(axis=None)
    assert (sides["peak"] >= sides["loaded"]).all() and sides["milliseconds"].gt(0).all()
    changes = changes.set_index("change")
    assert changes.loc["the paper", ["norm", "cosine"]].tolist() == [1, 1]
    assert changes.loc["population std", "norm"] > 1.1 and changes.loc["population std", "cosine"] > 0.99
    assert changes.loc["use_bias_correction_kl", "cosine"] < 0.9999
    assert {path.name for path in tmp_path.glob("*.png")} == {"curves.png", "changes.png"}
    assert json.loads((tmp_path / "settings.json").read_text())["seeds"] == [0, 1]


def test_differences_are_taken_within_each_seed():
    names = list(study.CHANGES)
    rows = [
        {"change": name, "seed": seed, "accuracy": 0.1 * seed + 0.01 * i} for i, name in enumerate(names) for seed in range(3)
    ]
    found = study.differences(pd.DataFrame(rows), "accuracy")
    assert list(found) == names[1:]
    for i, name in enumerate(names[1:], start=1):
        assert (found[name].value, found[name].low) == pytest.approx((0.01 * i, 0.01 * i))
