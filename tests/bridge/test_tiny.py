"""Small models and their tokenizer: made alike everywhere, taught what they should be taught, shipped as they are described."""

import json
import random
import socket

import pytest
import torch

pytest.importorskip("transformers", reason='needs pip install -e ".[real]"')

from grpo_core import greedy_accuracy, sample_groups
from grpo_core.bridge import tiny
from grpo_core.bridge.causal_lm import CausalLM, eos_ids
from grpo_core.bridge.gsm8k import Splits, to_problem
from grpo_core.bridge.text_task import TextTask
from grpo_core.bridge.tiny import (
    FOLDER,
    MAX_LENGTH,
    MAX_NEW_TOKENS,
    RECIPE,
    encode_record,
    fine_tune,
    rebuild,
    solution_loss,
    tiny_gpt2,
    tiny_llama,
    tiny_start,
    train_tokenizer,
    with_slip,
)
from grpo_core.bridge.word_problems import word_problem_records, word_problem_splits, word_problems
from grpo_core.evaluate import greedy_completions

BUILDERS = [tiny_llama, tiny_gpt2]
RECORDS = word_problems(160, seed=5)
QUESTION = "<|user|>How many?<|end|><|assistant|>"


def texts(records):
    return [record[key] for record in records for key in ("question", "answer")]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(texts(RECORDS))


@pytest.fixture(scope="module")
def shipped():
    return tiny_start()


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


# The tokenizer


@pytest.mark.parametrize(
    "text",
    ["", " ", "24 + 48 = 72\n#### 72", "  two  spaces ", "größer, 大きい 🙂 ½", "\t\r\n\x00", "$1,234.50 <|user", "1" * 40],
)
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_random_text_comes_back(tokenizer):
    rng = random.Random(0)
    text = "".join(chr(rng.choice([*range(256), *range(0x400, 0x500), *range(0x1F600, 0x1F640)])) for _ in range(2000))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_tokens_of_their_own_and_words_are_whole(tokenizer):
    digits = set("0123456789")
    assert all(token in digits for token in tokenizer.get_vocab() if digits & set(token))
    assert [tokenizer.decode([i]) for i in tokenizer.encode("How many eggs are there? 1,305 + 48")] == [
        "How", " many", " eggs", " are", " there", "?", " ", "1", ",", "3", "0", "5", " +", " ", "4", "8",
    ]  # fmt: skip


def test_special_tokens_are_read_as_one_and_none_is_for_padding(tokenizer):
    names = ["<|end|>", "<|endoftext|>", "<|user|>", "<|assistant|>"]
    assert tokenizer.encode("".join(names)) == tokenizer.convert_tokens_to_ids(names)
    assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token is None and tokenizer.bos_token is None


def test_chat_template_writes_the_turns_and_opens_the_answer(tokenizer):
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "2"}]
    assert tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True) == QUESTION
    assert tokenizer.apply_chat_template(turns, tokenize=False) == QUESTION + "2<|end|>"
    with pytest.raises(Exception, match="user and assistant, got system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "Think"}])


def test_the_same_texts_give_the_same_tokenizer_and_vocab_size_bounds_it(tokenizer):
    assert train_tokenizer(texts(RECORDS)).backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    small = train_tokenizer(texts(RECORDS), vocab_size=260)
    assert len(small) == 260 and small.decode(small.encode("24 eggs")) == "24 eggs"
    with pytest.raises(ValueError, match="at least 260"):
        train_tokenizer([], vocab_size=259)


# The models


@pytest.mark.parametrize("build", BUILDERS)
def test_weights_depend_on_the_seed_alone_and_the_global_generator_is_left_alone(build, tokenizer):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = weights(build(tokenizer, 16, 1, seed=3))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(weights(build(tokenizer, 16, 1, seed=3)), first)
    assert not torch.equal(weights(build(tokenizer, 16, 1, seed=4)), first)


@pytest.mark.parametrize("width, layers", [(16, 1), (32, 3)])
def test_models_have_the_size_asked_for(tokenizer, width, layers):
    """Counted by hand. The output matrix is the embedding; only GPT-2 learns positions and has biases."""
    words = len(tokenizer) * width
    llama = words + layers * (4 * width**2 + 3 * width * 3 * width + 2 * width) + width
    gpt2 = words + MAX_LENGTH * width + layers * (12 * width**2 + 13 * width) + 2 * width
    for build, size in zip(BUILDERS, (llama, gpt2)):
        assert weights(build(tokenizer, width, layers)).numel() == size


@pytest.mark.parametrize("build", BUILDERS)
def test_models_know_both_tokens_that_end_a_completion(build, tokenizer, tmp_path):
    model = build(tokenizer, 16, 1)
    assert eos_ids(model, tokenizer) == tuple(tokenizer.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"]))
    model.save_pretrained(tmp_path)
    assert eos_ids(type(model).from_pretrained(tmp_path), tokenizer) == eos_ids(model, tokenizer)


def test_gpt2_has_dropout_if_asked_for(tokenizer):
    ids = torch.tensor([tokenizer.encode(QUESTION)])
    for dropout in (0.0, 0.5):
        model = tiny_gpt2(tokenizer, 16, 1, dropout=dropout).train()
        assert torch.equal(model(ids).logits, model(ids).logits) == (dropout == 0)


# Fine-tuning


def test_targets_are_the_solution_and_its_eos(tokenizer):
    record = {"question": "24 eggs?", "answer": "24 + 1 = <<24+1=25>>25\n#### 25"}
    ids, targets = encode_record(tokenizer, record)
    assert tokenizer.decode(ids) == "<|user|>24 eggs?<|end|><|assistant|>24 + 1 = 25\n#### 25<|end|>"
    taught = targets >= 0
    assert tokenizer.decode(ids[taught]) == "24 + 1 = 25\n#### 25<|end|>"
    assert torch.equal(ids[taught], targets[taught]) and taught.tolist() == sorted(taught.tolist())


@pytest.mark.parametrize("build", BUILDERS)
def test_loss_is_that_of_one_token_of_one_row_at_a_time(build, tokenizer):
    """Rows of several lengths; the oracle reads question and solution from the text, without padding, targets or shifts."""
    model, losses = build(tokenizer, 16, 2, seed=1).double(), []
    for record in RECORDS[:3] + RECORDS[13:16]:
        prompt = tokenizer.encode(f"<|user|>{record['question']}<|end|><|assistant|>")
        answer = tokenizer.encode(record["answer"] + "<|end|>")
        for t, token in enumerate(answer):
            logits = model(torch.tensor([prompt + answer[:t]])).logits[0, -1]
            losses.append(logits.logsumexp(0) - logits[token])
    rows = [encode_record(tokenizer, record) for record in RECORDS[:3] + RECORDS[13:16]]
    assert len({len(ids) for ids, _ in rows}) > 2
    loss, oracle = solution_loss(model, rows), sum(losses) / len(losses)
    assert loss.item() == pytest.approx(oracle.item(), abs=1e-6)
    for ours, true in zip(*(torch.autograd.grad(scalar, list(model.parameters())) for scalar in (loss, oracle))):
        assert torch.allclose(ours, true, atol=1e-7)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("slips", [0.0, 1.0])
def test_a_model_learns_two_solutions_by_heart_and_slips_if_it_was_taught_to(build, slips, tokenizer):
    model, two = build(tokenizer, 32, 1), [RECORDS[0], RECORDS[13]]
    fine_tune(model, tokenizer, two, steps=40, batch_size=4, learning_rate=1e-2, slips=slips)
    problems = [to_problem(record) for record in two]
    task = TextTask(tokenizer, Splits(problems, problems, problems), eos_ids(model, tokenizer), MAX_NEW_TOKENS)
    taught = [with_slip(record) if slips else record for record in two]
    assert greedy_completions(CausalLM(model), task, problems) == [record["answer"] + "<|end|>" for record in taught]
    assert greedy_accuracy(CausalLM(model), task, problems) == 1 - slips


def test_fine_tuning_gives_the_same_model_again_whatever_ran_before(tokenizer):
    results = []
    for seed in (0, 0, 1):
        torch.rand(3)
        model = tiny_llama(tokenizer, 16, 1)
        fine_tune(model, tokenizer, RECORDS, steps=2, seed=seed, slips=0.5)
        results.append(weights(model))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_a_share_of_the_solutions_has_a_slip(tokenizer, monkeypatch):
    seen = []
    monkeypatch.setattr(tiny, "solution_loss", lambda model, rows: seen.extend(rows) or weights_sum(model))
    model = tiny_llama(tokenizer, 4, 1)
    fine_tune(model, tokenizer, RECORDS[:1], steps=20, batch_size=50, slips=0.3)
    slipped, _ = encode_record(tokenizer, with_slip(RECORDS[0]))
    share = sum(torch.equal(ids, slipped) for ids, _ in seen) / 1000
    assert len(seen) == 1000 and share == pytest.approx(0.3, abs=0.06)  # Four standard errors.


def weights_sum(model):
    return sum(weight.sum() for weight in model.parameters())


@pytest.mark.parametrize("record", RECORDS[:16])
def test_a_slip_is_ten_off_in_the_last_result_and_nowhere_else(record):
    slip = with_slip(record)
    lines, slipped = record["answer"].split("\n"), slip["answer"].split("\n")
    assert slip["question"] == record["question"] and slipped[:-2] == lines[:-2]
    true, false = (int(text[-1].removeprefix("#### ").replace(",", "")) for text in (lines, slipped))
    assert abs(true - false) == 10 and false >= 0
    assert slipped[-2] == f"{lines[-2].split(' = ')[0]} = {false:,}" and slipped[-1] == f"#### {false:,}"


@pytest.mark.parametrize("result, slip", [(9, 19), (0, 10), (10, 0), (1000, 990)])
def test_a_slip_is_never_negative(result, slip):
    record = {"question": "?", "answer": f"{result:,} + 0 = {result:,}\n#### {result:,}"}
    assert with_slip(record)["answer"] == f"{result:,} + 0 = {slip}\n#### {slip}"


@pytest.mark.parametrize("wrong", [{"records": []}, {"steps": -1}, {"slips": 1.1}, {"slips": -0.1}])
def test_what_cannot_be_taught_is_refused(wrong, tokenizer):
    with pytest.raises(ValueError, match="give records"):
        fine_tune(tiny_llama(tokenizer, 4, 1), tokenizer, **{"records": RECORDS, "steps": 1} | wrong)


# What is shipped


def test_shipped_model_loads_without_a_network_and_each_call_gives_its_own(monkeypatch):
    def unreachable(*arguments):
        raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    first, tokenizer = tiny_start()
    second, _ = tiny_start()
    with torch.no_grad():
        first.model.norm.weight.add_(1)
    assert not torch.equal(weights(first), weights(second))
    assert type(first) is type(tiny_llama(tokenizer)) and 100_000 < weights(first).numel() < 500_000


def test_shipped_folder_is_small_and_holds_text_and_plain_weights():
    files = sorted(path.name for path in FOLDER.iterdir())
    assert files == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2_000_000
    assert json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"] == [0, 1]


def test_shipped_tokenizer_is_the_one_that_the_training_problems_give(shipped):
    again = train_tokenizer(texts(word_problem_records()[0]))
    assert again.backend_tokenizer.to_str() == shipped[1].backend_tokenizer.to_str()
    assert again.chat_template == shipped[1].chat_template and len(again) == shipped[0].config.vocab_size


def test_longest_prompt_and_solution_fit(shipped):
    train, validation, held_out = word_problem_records()
    rows = [encode_record(shipped[1], record) for record in train[::5] + validation + held_out]
    assert max((targets >= 0).sum().item() for _, targets in rows) <= MAX_NEW_TOKENS
    assert max(len(ids) for ids, _ in rows) < MAX_LENGTH


def test_shipped_model_sets_up_the_calculation_and_often_gets_it_wrong(shipped):
    """The half that it was taught. In eight tries it mostly has one that is right: that is what GRPO builds on."""
    model, tokenizer = shipped
    task = TextTask(tokenizer, word_problem_splits(), eos_ids(model, tokenizer), MAX_NEW_TOKENS)
    solutions = [record["answer"] for record in word_problem_records()[1][:120]]
    completions = greedy_completions(CausalLM(model), task, task.validation[:120])
    right = sum(map(task.verify, completions, (problem.answer for problem in task.validation)))
    set_up = sum(text.split(" = ")[0] == true.split(" = ")[0] for text, true in zip(completions, solutions))
    assert 0.15 < right / 120 < 0.45 and set_up > 0.95 * 120
    generator = torch.Generator().manual_seed(0)
    rollout = sample_groups(CausalLM(model), task, task.validation[:60], 8, 1.0, generator=generator)
    assert (rollout.rewards.amax(dim=1) == 1).float().mean() > 0.6
    assert sum(text.endswith("<|end|>") for text in rollout.texts) > 0.97 * 480


def test_rebuild_follows_the_recipe_and_writes_a_folder_that_loads(tmp_path, monkeypatch, tokenizer):
    """With few steps and few problems. That these make a good model is what the shipped one shows."""
    monkeypatch.setattr(tiny, "word_problem_records", lambda: (RECORDS, [], []))
    monkeypatch.setattr(tiny, "word_problem_splits", lambda: Splits([], [to_problem(r) for r in RECORDS[:10]], []))
    monkeypatch.setattr(tiny, "RECIPE", RECIPE | {"steps": 3})
    assert "validation problems 0.0" in rebuild(tmp_path)
    monkeypatch.setattr(tiny, "FOLDER", tmp_path)
    model, _ = tiny_start()
    same = tiny_llama(tokenizer)
    fine_tune(same, tokenizer, RECORDS, **RECIPE | {"steps": 3})
    assert torch.equal(weights(model), weights(same))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in FOLDER.iterdir())
