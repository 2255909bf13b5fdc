# make run    train GRPO and write outputs/          make test   everything that proves it right
# make lab    JupyterLab on the notebooks            make bench  time it against TRL
# Python 3.11 or newer is all that is needed; PYTHON=python3.12 picks another one.

export PYTHONUTF8 = 1
PYTHON ?= python3
ARGS ?=
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH := torch==2.13.0

ifeq ($(OS),Windows_NT)
BIN := .venv/Scripts
else
BIN := .venv/bin
endif

.PHONY: run test lab bench results results-real clean

run: .venv/core
	@$(BIN)/python -m grpo_core $(ARGS)

test: .venv/test
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile $(ARGS)

lab: .venv/test
	@$(BIN)/jupyter lab notebooks

bench: .venv/test
	$(BIN)/python -m tests.benchmarks

# The numbers of the README: five seeds each. The third takes as much computing as the reference run had, 2.5 minutes a seed.
results: .venv/core
	$(BIN)/python -m grpo_core
	$(BIN)/python -m grpo_core --seeds 5 --output outputs/five_seeds
	$(BIN)/python -m grpo_core --seeds 5 --inner-epochs 1 --output outputs/one_gradient_step
	$(BIN)/python -m grpo_core --seeds 5 --output outputs/long_run --iterations 1600 --temperature 1 --beta 0 --scale none \
	    --learning-rate 5e-4 --schedule linear --evaluate-every 100
	$(BIN)/python -m grpo_core scoreboard
	$(BIN)/python -m grpo_core baselines
	$(BIN)/python -m grpo_core shopping-list
	$(BIN)/python -m grpo_core growing-reasoning
	$(BIN)/python -m grpo_core no-leash

# Those of notebook 9, which need Hugging Face's libraries.
results-real: .venv/test
	$(BIN)/python -m grpo_core real-models
	$(BIN)/python -m grpo_core trl-side-by-side

clean:
	rm -rf .venv

# On Linux a plain "pip install torch" brings several GB of CUDA. The CPU build comes from PyTorch's own index; where that
# cannot be reached, from wherever pip is set up to look.
.venv/torch:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=python3.11')"
	@echo "Setting up .venv with a CPU build of PyTorch, once …"
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install --quiet --retries 0 --timeout 15 --index-url $(CPU_INDEX) $(TORCH) \
	    || $(BIN)/python -m pip install --quiet $(TORCH)
	@touch $@

.venv/core: .venv/torch pyproject.toml
	@$(BIN)/python -m pip install --quiet -e .
	@touch $@

.venv/test: .venv/core
	@echo "Adding JupyterLab, Hugging Face's libraries and the tests' packages, once …"
	@$(BIN)/python -m pip install --quiet -e ".[notebooks,test,browser,real]"
	@touch $@
