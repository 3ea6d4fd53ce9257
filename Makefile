# Two commands: `make tour` and `make test`. Both first set up what they need; the second one reuses it.
# Needs GNU make and Python 3.11 or newer with venv. `make help` lists the rest.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# READY is written last and says what was installed: stack, interpreter, how much of the stack (what a tour needs, or
# the whole), folder. A .venv whose Python no longer starts counts as none; one made elsewhere (a moved checkout) no
# longer matches.
MEMORY := $(strip $(shell $(BIN)/python -c pass 2>/dev/null && cat $(READY) 2>/dev/null))

# What was chosen once stays chosen until another is asked for.
STACK ?= $(or $(word 1,$(MEMORY)),$(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo cu12 || echo cpu))
STACK := $(STACK)
PYTHON ?= $(or $(word 2,$(MEMORY)),python3)
PART := $(if $(filter setup lint test test-long test-colab test-browser lab site,$(MAKECMDGOALS)),whole,$(or $(filter whole,$(word 3,$(MEMORY))),tour))
WANTED := $(strip $(STACK) $(PYTHON) $(PART) $(CURDIR))

ifeq ($(filter cpu cu12 cu13,$(STACK)),)
$(error STACK is '$(STACK)'; it can be cpu, cu12 or cu13)
endif

# A CPU machine compiles the kernels without running them; the CUDA stacks bring their own compiler.
EXTRA := $(if $(filter cpu,$(STACK)),compile,$(STACK))
EXTRAS_whole := course,test,$(EXTRA)
EXTRAS_tour := $(filter-out cpu,$(STACK))
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

.PHONY: help setup tour lint test test-long test-colab test-browser lab site clean
.DEFAULT_GOAL := help

help:
	@echo "make tour    set up what it needs, then train, pack, check and time; ends in build/tour/index.html"
	@echo "make test    set everything up, then run the tests and the notebooks"
	@echo "make lint    set everything up, then look for what ruff and mypy find: form, slips, types that do not fit"
	@echo "make test-long  set everything up, then run for an hour or so what is rare and long: all of tests/nightly but Colab and a browser"
	@echo "make test-colab    set everything up, then run each notebook from the wheel with Colab's versions (gigabytes, once)"
	@echo "make test-browser  set everything up, then move each notebook's widget by keyboard in JupyterLab in a browser"
	@echo "make lab     set everything up, then open the course in JupyterLab, to be filled in, in twell-lab-course"
	@echo "make site    set everything up, then make pages of the course, the worklogs and the library: build/site/index.html"
	@echo "make setup   only set up, into $(VENV); STACK=cpu, cu12 or cu13 (here: $(STACK)), PYTHON=python3.12"
	@echo "make clean   remove $(VENV), build/ and caches"
	@echo "TOUR_ARGS, PYTEST_ARGS, ATTACK_ARGS and COURSE_ARGS are passed on, as in: make test PYTEST_ARGS='-x tests/formats'"

setup: $(READY)
	@$(BIN)/python -c 'import platform; from importlib.metadata import version; \
	  print("setup: ready ($(STACK) stack, Python", platform.python_version() + ", torch", version("torch") + ")")'

ifneq ($(MEMORY),$(WANTED))
.PHONY: $(READY)
endif

$(READY): pyproject.toml constraints/$(STACK).txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "setup: there is no $(PYTHON) here; install Python 3.11 or newer" >&2; exit 1; }
	@recent='import sys; sys.exit(sys.version_info < (3, 11))'; \
	$(PYTHON) -c "$$recent" || { \
	  for other in python3.13 python3.12 python3.11; do \
	    $$other -c "$$recent" 2>/dev/null && break; other="python3.12, once it is installed"; \
	  done; \
	  echo "setup: $(PYTHON) is $$($(PYTHON) -V 2>&1), and 3.11 or newer is needed; try PYTHON=$$other" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "setup: $(PYTHON) has no venv; install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@rm -f $(READY); mkdir -p build
	@case "$(MEMORY)" in "$(STACK) $(PYTHON) tour $(CURDIR)"|"$(STACK) $(PYTHON) whole $(CURDIR)") ;; *) \
	  echo "setup: making $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv --clear $(VENV) ;; esac
	@echo "setup: installing the $(STACK) stack; this can take minutes (log: build/setup.log)"
	@rm -f build/setup.log build/setup.done; start=$$(date +%s); \
	{ $(BIN)/python -m pip install --disable-pip-version-check --no-input --progress-bar off \
	    --log build/setup.log -c constraints/$(STACK).txt -e '.$(if $(EXTRAS_$(PART)),[$(EXTRAS_$(PART))])' 2>&1 \
	  && touch build/setup.done; } | while IFS= read -r line; do case "$$line" in \
	    *Downloading*[0-9][0-9].[0-9]\ MB*|ERROR:*) echo "setup: $$line" ;; \
	    Installing\ collected*) echo "setup:   installing what was collected" ;; esac; done; \
	if [ ! -e build/setup.done ]; then \
	  echo "setup: pip could not install the $(STACK) stack; build/setup.log says why" >&2; exit 1; fi; \
	echo "setup: installed in $$(($$(date +%s) - start)) s"
	@echo "$(WANTED)" > $(READY)

tour: setup
	@$(BIN)/twell-lab tour $(TOUR_ARGS)

# Neither writes into a file; `ruff format` and `ruff check --fix` do.
lint: setup
	@$(BIN)/python -m ruff format --check
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m mypy

# Two processes take what lies in a file each. Threads that wait in OpenMP spin by default, which on a busy machine keeps
# the others from working.
JOBS ?= 2
test: export OMP_WAIT_POLICY ?= PASSIVE
test: setup
	@start=$$(date +%s); \
	if $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --nbval-lax --nbval-current-env --nbval-cell-timeout=300 \
	    $(or $(PYTEST_ARGS),tests $(NOTEBOOKS)); \
	then echo "test: passed on the $(STACK) stack in $$(($$(date +%s) - start)) s"; \
	else status=$$?; echo "test: FAILED on the $(STACK) stack (pytest's exit status is $$status)" >&2; exit $$status; fi

# ATTACK_ARGS: such as --attack-seed=7 for other cases.
test-long: export OMP_WAIT_POLICY ?= PASSIVE
test-long: setup
	@$(BIN)/python -m pytest --durations=0 tests/nightly --ignore=tests/nightly/test_browser.py \
	    --ignore=tests/nightly/test_on_colab.py $(ATTACK_ARGS)

# COLAB_PYTHON: the interpreter, else python3.13 or python3.12. COURSE_ARGS: such as -k 00- for one notebook.
test-colab: setup
	@$(BIN)/python -m pytest -rs --durations=0 tests/nightly/test_on_colab.py $(COURSE_ARGS)

# Playwright drives a Chromium that is installed already; it is no part of the stacks, since nothing else needs it.
test-browser: setup
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/$(STACK).txt -e '.[browser]'
	@$(BIN)/python -m pytest -rs --durations=0 tests/nightly/test_browser.py $(COURSE_ARGS)

lab: setup
	@$(BIN)/twell-lab course

site: export NO_MKDOCS_2_WARNING := 1
site: setup
	@$(BIN)/python -m mkdocs build --quiet && echo "site: open build/site/index.html"

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
