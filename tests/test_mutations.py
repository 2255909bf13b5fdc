"""The tests of the tests: each fault below was published somewhere. Planted in a copy of the package, it must be noticed."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import grpo_core

TESTS, PACKAGE = Path(__file__).parent, Path(grpo_core.__file__).parent

MUTATIONS = {
    "the sample standard deviation, torch's default": (
        "advantages.py",
        "rewards.std(dim=1, keepdim=True, correction=correction)",
        "rewards.std(dim=1, keepdim=True)",
        "test_advantages.py::test_worked_group",
    ),
    "the mean of the batch": (
        "advantages.py",
        "rewards.mean(dim=1, keepdim=True)",
        "rewards.mean()",
        "test_advantages.py::test_each_group_has_its_own_mean_and_std",
    ),
    "a flat group is one whose std is 0": (
        "advantages.py",
        "return rewards.amax(dim=1) == rewards.amin(dim=1)",
        "return rewards.std(dim=1, correction=0) == 0",
        "test_advantages.py::test_flat_group_is_exactly_zero_and_counted",
    ),
    "the maximum for negative advantages": (
        "surrogate.py",
        "return torch.minimum(r * per_row, r.clamp(low, high) * per_row)",
        "a, b = r * per_row, r.clamp(low, high) * per_row; return torch.where(per_row < 0, a.maximum(b), a.minimum(b))",
        "test_surrogate.py::test_objective_and_slope_for_both_signs",
    ),
    "every ratio outside the band counts as clipped": (
        "surrogate.py",
        "return ((r > high) & (per_row > 0)) | ((r < low) & (per_row < 0))",
        "return (r > high) | (r < low)",
        "test_surrogate.py::test_clip_fraction_counts_only_where_the_clip_binds_inside_the_mask",
    ),
    "advantages run along the tokens": (
        "surrogate.py",
        "return advantages.unsqueeze(1)",
        "return advantages",
        "test_surrogate.py::test_each_advantage_goes_with_its_row_where_rows_and_tokens_are_equally_many",
    ),
    "temperature left out of the scores": (
        "rollout.py",
        ".detach()) / temperature",
        ".detach())",
        "test_rollout.py::test_scoring_divides_the_logits_by_the_temperature",
    ),
    "EOS left out of the mask": (
        "rollout.py",
        "return ends.cumsum(dim=1) - ends.long() == 0",
        "return ends.cumsum(dim=1) == 0",
        "test_rollout.py::test_mask_runs_through_the_first_eos",
    ),
    "logits off by one": (
        "rollout.py",
        "[:, prompt_ids.shape[1] - 1 : -1]",
        "[:, prompt_ids.shape[1] :]",
        "test_rollout.py::test_each_token_is_scored_by_the_logits_before_it",
    ),
    "positions shifted by the padding": (
        "rollout.py",
        '{"attention_mask": mask, "position_ids": positions(mask)[:, mask.shape[1] - count :]}',
        '{"attention_mask": mask}',
        "test_rollout.py::test_mixed_prompt_lengths_score_as_one_row_at_a_time",
    ),
    "rows of a group far apart": (
        "rollout.py",
        "prompt_ids = prompt_ids.repeat_interleave(group_size, dim=0)",
        "prompt_ids = prompt_ids.repeat(group_size, 1)",
        "test_rollout.py::test_rows_of_a_group_are_neighbors",
    ),
    "dropout while scoring": (
        "rollout.py",
        "        policy.eval()\n",
        "        pass\n",
        "test_rollout.py::test_scoring_is_free_of_dropout_and_leaves_the_mode_alone",
    ),
    "k3 in the wrong direction": (
        "kl.py",
        "return expm1_linear_far(d) - d",
        "return expm1_linear_far(-d) + d",
        "test_kl.py::test_expected_value_on_three_tokens",
    ),
    "exp(d) − 1 instead of expm1": (
        "kl.py",
        "torch.expm1(x.clamp(max=FAR))",
        "(torch.exp(x.clamp(max=FAR)) - 1)",
        "test_kl.py::test_k3_close_by_keeps_its_digits",
    ),
    "a clamp that lets go of the leash": (
        "kl.py",
        "return near + (near.detach() + 1) * torch.relu(x - FAR)",
        "return near",
        "test_kl.py::test_k3_far_below_the_reference_is_finite_and_pulls_up",
    ),
    "multiplying by the mask": (
        "grpo.py",
        "torch.where(mask[rows], per_token, 0.0).sum(dim=1)",
        "(mask[rows] * per_token).sum(dim=1)",
        "test_grpo.py::test_nothing_outside_the_mask_is_read",
    ),
    "the mean of micro-batch means": (
        "grpo.py",
        "sums.sum() / lengths.sum().clamp(min=1)",
        "sums.sum() / lengths[rows].sum().clamp(min=1)",
        "test_grpo.py::test_token_mean_is_no_mean_of_means",
    ),
    "a reference that shares the policy's storage": (
        "grpo.py",
        "else copy.deepcopy(policy).requires_grad_(False)",
        "else policy",
        "test_grpo.py::test_reference_stays_the_start_policy_and_shares_no_storage",
    ),
    "a surrogate that is minimized": (
        "grpo.py",
        "per_token = -clipped_surrogate(*clip)",
        "per_token = clipped_surrogate(*clip)",
        "test_grpo.py::test_training_learns_another_task",
    ),
    "GAE bootstraps from the padding": (
        "rivals/gae.py",
        "torch.where(mask, rewards, 0.0), torch.where(mask, values.detach(), 0.0)",
        "torch.where(mask, rewards, 0.0), values.detach()",
        "rivals/test_gae.py::test_known_values_whatever_stands_behind_the_end",
    ),
    "the value loss takes the minimum": (
        "rivals/ppo.py",
        "torch.maximum((values - returns)",
        "torch.minimum((values - returns)",
        "rivals/test_ppo.py::test_value_loss_and_slope_on_both_sides_of_the_band",
    ),
    "a reward model that reads the last column": (
        "rivals/reward_model.py",
        "return numbers.gather(1, last_positions(mask).unsqueeze(1)).squeeze(1)",
        "return numbers[:, -1]",
        "rivals/test_reward_model.py::test_score_is_read_at_the_last_real_token_of_the_row_alone",
    ),
    "a reward model that finds the end by ids": (
        "rivals/reward_model.py",
        "last_positions(mask).unsqueeze(1)",
        "last_positions(token_ids != 2).unsqueeze(1)",
        "rivals/test_reward_model.py::test_score_is_read_at_the_last_real_token_of_the_row_alone",
    ),
    "a reward model that prefers the rejected": (
        "rivals/reward_model.py",
        "return -F.logsigmoid(margins).mean()",
        "return -F.logsigmoid(-margins).mean()",
        "rivals/test_reward_model.py::test_pair_loss_and_its_slope",
    ),
    "DPO on means over tokens": (
        "rivals/dpo.py",
        "torch.where(completion_mask.bool(), log_probs, 0.0).sum(dim=1)",
        "torch.where(completion_mask.bool(), log_probs, 0.0).sum(dim=1) / completion_mask.sum(dim=1)",
        "rivals/test_dpo.py::test_log_prob_of_a_completion_is_the_sum_over_its_tokens",
    ),
    "DPO without the reference": (
        "rivals/dpo.py",
        "beta * ((chosen - ref_chosen) - (rejected - ref_rejected))",
        "beta * (chosen - rejected)",
        "rivals/test_dpo.py::test_a_policy_that_is_the_reference_has_loss_ln_2",
    ),
    "DPO with chosen and rejected swapped": (
        "rivals/dpo.py",
        "torch.cat([pairs.chosen_ids, pairs.rejected_ids])",
        "torch.cat([pairs.rejected_ids, pairs.chosen_ids])",
        "rivals/test_dpo.py::test_prompts_of_different_lengths_score_as_one_pair_at_a_time",
    ),
    "leave-one-out that includes itself": (
        "advantages.py",
        'group_advantages(rewards, scale="none") * (group_size / (group_size - 1))',
        'group_advantages(rewards, scale="none")',
        "rivals/test_reinforce.py::test_baselines_are_those_of_the_plain_definition",
    ),
    "expert iteration imitates wrong completions too": (
        "rivals/imitation.py",
        'if keep == "all" or reward == 1]',
        'if keep == "all" or reward >= 0]',
        "rivals/test_imitation.py::test_each_right_completion_is_kept_once_and_no_wrong_one",
    ),
    "the exact value taken for the best constant": (
        "rivals/baselines.py",
        "(squared @ completions.rewards / squared.sum()).item()",
        "completions.value",
        "rivals/test_baselines.py::test_no_constant_is_quieter_than_the_best_one",
    ),
    "pairs across prompts": (
        "rivals/pairs.py",
        "count = min(len(right), len(wrong))",
        "count = len(right) if len(wrong) else 0",
        "rivals/test_pairs.py::test_pairs_are_those_of_the_plain_definition",
    ),
    "the truth is paid anywhere in the text": (
        "sloppy_grader.py",
        "answer in guesses(completion))",
        "answer in completion)",
        "test_sloppy_grader.py::test_neither_pays_without_a_right_guess_and_an_end",
    ),
    "the true reward is what the grader pays": (
        "sloppy_grader.py",
        "return exact_grader(completion, answer)",
        "return self.verify(completion, answer)",
        "test_sloppy_grader.py::test_sloppy_grader_pays_for_any_guess_and_the_truth_for_one_only",
    ),
    "a leash whose beta is turned around": (
        "leash.py",
        "rewards / beta).softmax",
        "rewards * beta).softmax",
        "test_sloppy_grader.py::test_closed_form_on_three_answers",
    ),
    "the other KL": (
        "leash.py",
        "(mine.exp() * (mine - theirs))",
        "(theirs.exp() * (theirs - mine))",
        "test_sloppy_grader.py::test_mean_completion_kl_is_the_kl_of_whole_completions",
    ),
    "processes that each divide by their own tokens": (
        "grpo.py",
        "(share * loss).backward()",
        "(loss / processes.count()).backward()",
        "test_processes.py::test_several_processes_take_the_step_of_one[2]",
    ),
    "a gradient norm that is clipped on each process": (
        "processes.py",
        "dist.all_reduce(parameter.grad)",
        "pass",
        "test_processes.py::test_several_processes_take_the_step_of_one[2]",
    ),
    "processes that all sample with the same noise": (
        "processes.py",
        "manual_seed(seed + rank())",
        "manual_seed(seed)",
        "test_processes.py::test_processes_sample_differently_and_draw_problems_alike",
    ),
    "positions of a real model that count its padding": (
        "bridge/causal_lm.py",
        "return self(token_ids, mask, positions(mask), last",
        "return self(token_ids, mask, positions(torch.ones_like(mask)), last",
        "bridge/test_causal_lm.py::test_left_padding_scores_as_one_row_at_a_time",
    ),
    "padding of a real model that is attended to": (
        "bridge/causal_lm.py",
        "else attention_mask.long()",
        "else torch.ones_like(attention_mask).long()",
        "bridge/test_causal_lm.py::test_left_padding_scores_as_one_row_at_a_time",
    ),
    "dropout that stays on while a real model is trained": (
        "bridge/causal_lm.py",
        "self.model = without_dropout(model)",
        "self.model = model",
        "bridge/test_causal_lm.py::test_dropout_is_switched_off_in_any_mode",
    ),
    "a reference whose adapter is on": (
        "bridge/causal_lm.py",
        "with self.policy.model.disable_adapter() if self.policy.has_adapter else nullcontext():",
        "with nullcontext():",
        "bridge/test_causal_lm.py::test_adapter_starts_at_nothing_and_the_reference_is_the_model_without_it",
    ),
    "a model of several EOS that ends at one only": (
        "rollout.py",
        "return torch.isin(token_ids, torch.as_tensor(eos_id, device=token_ids.device))",
        "return token_ids == filling(eos_id)",
        "bridge/test_causal_lm.py::test_greedy_completions_are_those_of_transformers",
    ),
    "a verifier that TRL calls without the end of the text": (
        "bridge/trl_run.py",
        "task.verify(task.decode(ids), truth)",
        "task.verify(task.tokenizer.decode(ids, skip_special_tokens=True), truth)",
        "bridge/test_trl_real.py::test_prompts_and_rewards_are_those_of_the_task",
    ),
    "TRL's correction of the KL, which the paper does not have": (
        "bridge/trl_run.py",
        '"use_bias_correction_kl": False',
        '"use_bias_correction_kl": True',
        "bridge/test_trl_real.py::test_weights_after_a_step_are_those_of_trls_trainer[Llama, two steps, clip-higher]",
    ),
}
if find_spec("transformers") is None:  # An extra: pip install -e ".[real]"
    MUTATIONS = {name: row for name, row in MUTATIONS.items() if not row[3].startswith("bridge/")}


def plant(mutation, folder):
    """Copy the package into the folder, with the fault in it, unless there is none (None)."""
    shutil.copytree(PACKAGE, folder / "grpo_core", ignore=shutil.ignore_patterns("__pycache__", "lab"))
    if mutation is None:
        return
    file, old, new, _ = MUTATIONS[mutation]
    path = folder / "grpo_core" / file
    source = path.read_text(encoding="utf-8")
    if source.count(old) != 1:
        pytest.fail(f"{file} does not hold {old!r} exactly once: update this mutation")
    path.write_text(source.replace(old, new), encoding="utf-8")


# Runs in another process, where torch is imported once: each line of input, [folder, test, …], is a fresh import of the
# package in that folder and a run of the tests, each line of output pytest's exit status and report.
SERVER = """
import contextlib, importlib, io, json, sys
import pytest, torch, pandas, hypothesis.extra.numpy
known = set(sys.modules)
for line in sys.stdin:
    folder, *tests = json.loads(line)
    for name in set(sys.modules) - known:
        if name.partition(".")[0] == "grpo_core" or name == "conftest" or name.startswith("test_"):
            del sys.modules[name]
    sys.path[0] = folder
    importlib.invalidate_caches()
    with contextlib.redirect_stdout(io.StringIO()) as report:
        import grpo_core
        assert grpo_core.__file__.startswith(folder), grpo_core.__file__
        status = pytest.main(["-xq", "-p", "no:cacheprovider", "-c", folder + "/pytest.ini", *tests])
    print(json.dumps([status, report.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def run_on_copy(tmp_path_factory):
    """Plant a fault in a copy of the package and run the tests on it; returns exit status and report."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(mutation, tests):
        folder = tmp_path_factory.mktemp("copy")
        (folder / "pytest.ini").write_text("[pytest]\n")
        plant(mutation, folder)
        print(json.dumps([str(folder), *(str(TESTS / test) for test in tests)]), file=server.stdin, flush=True)
        return json.loads(server.stdout.readline())

    with server:
        yield run


def test_named_tests_pass_without_a_fault(run_on_copy):
    status, report = run_on_copy(None, sorted({test for *_, test in MUTATIONS.values()}))
    assert status == 0, report


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_planted_fault_is_noticed(run_on_copy, mutation):
    test = MUTATIONS[mutation][3]
    status, report = run_on_copy(mutation, [test])
    assert status == 1, f"{test} did not notice: {mutation}\n{report}"
    assert "AssertionError" in report or "E       assert" in report, report
