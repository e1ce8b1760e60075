"""`pop-bench` on a tiny bundle: what it says, what it refuses, and the arithmetic between samples and figures."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pop_runtime
from pop_runtime.bench import agreement
from pop_runtime.bench import measure as measuring
from pop_runtime.bench.cli import main
from pop_runtime.bench.engines import CLOCKS, BundleEngine, Run, timed
from pop_runtime.bench.measure import Settings, measure
from pop_runtime.bench.output import table
from pop_runtime.bench.peers import PEERS, Peer
from pop_runtime.bench.processes import Worker
from pop_runtime.bench.rounds import Line, Sample, Spread, figures_of, prompt_of, ratios_to_peers, run_rounds
from pop_runtime.errors import BackendError
from pop_runtime.manifest import Plan, Windows
from pop_runtime.prompt_work import PromptWork, speedup_limit
from tests.runtime.tiny_bundle import PROMPT, SKIPPED, L, V, make_bundle

SMALL = ["--prompt-lengths", "8,20", "--new-tokens", "4", "--repeat", "2", "--threads", "1"]


def test_one_object_holds_times_memory_and_the_ratio_of_full_to_pruned(bundle, capsys, tmp_path):
    assert main([str(bundle), *SMALL, "--json", "--csv", str(tmp_path / "samples.csv")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(figure["label"], figure["num_prompt"]) for figure in report["figures"]] == [
        ("pop-export, pop prefill", 8), ("pop-export, full prefill", 8),
        ("pop-export, pop prefill", 20), ("pop-export, full prefill", 20),
    ]  # fmt: skip
    for figure in report["figures"]:
        for name in ("first_ms", "step_ms"):
            assert 0 < figure[name]["least"] <= figure[name]["median"] <= figure[name]["greatest"]
        assert figure["tokens_per_second"] == pytest.approx(1e3 / figure["step_ms"]["median"])
    assert (report["skipped_layers"], report["num_layers"]) == (list(SKIPPED), L)
    assert [(ratio["num_prompt"], ratio["limit"]) for ratio in report["pruned_against_full"]] == [(8, None), (20, None)]
    assert all(ratio["measured"] > 0 for ratio in report["pruned_against_full"])
    memory = report["memory"]
    both, one = (memory[name]["proportional_bytes"] for name in ("both_graphs", "one_graph"))
    assert memory["both_over_one"] == pytest.approx(both / one)
    assert 0 < one < memory["one_graph"]["peak_bytes"]
    rows = list(csv.DictReader((tmp_path / "samples.csv").open(encoding="utf-8")))
    assert len(rows) == 2 * 2 * 2  # prefills, lengths and rounds; the warm-up is not among them
    assert {row["round"] for row in rows} == {"1", "2"}


def test_the_table_and_the_plot_have_a_line_per_engine(bundle, capsys, tmp_path):
    picture = tmp_path / "first-token.png"
    assert main([str(bundle), *SMALL, "--prefill", "pop", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.count("pop-export, pop prefill  ") == 2 and "full prefill" not in out
    assert "memory: both graphs" in out and "1 threads, 2 rounds, wall time" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_windows_are_refused_where_they_have_no_effect_or_the_fit_does_not_cover_them(tmp_path, capsys):
    folder = make_bundle(tmp_path, plan=Plan(L, SKIPPED, "user", SKIPPED), windows=Windows(4, 2))
    flags = [str(folder), *SMALL, "--sink-tokens", "0"]
    assert main([*flags, "--prefill", "full"]) == 2
    assert "--sink-tokens: expected --prefill pop, found full, which has no windows" in capsys.readouterr().err
    assert main(flags) == 2
    assert "sink_tokens: expected at least 4, found 0" in capsys.readouterr().err


def test_less_memory_than_an_engine_was_built_for_is_a_usage_error(bundle, capsys):
    assert main([str(bundle), *SMALL, "--engine", "--low-memory"]) == 2
    assert "--low-memory: expected no engine, found one" in capsys.readouterr().err


def test_a_peer_without_package_or_model_is_named_with_what_would_help(bundle, capsys, monkeypatch, tmp_path):
    absent = Peer("nowhere", "no_such_module", "pip install nowhere", "a folder", PEERS["transformers"].load)
    present = Peer("numpy", "numpy", "pip install numpy", "a folder that `make` makes", absent.load)
    monkeypatch.setattr(measuring, "PEERS", {"absent": absent, "present": present})
    peers = f"absent=here,present={tmp_path / 'gone'},present"
    assert main([str(bundle), *SMALL, "--prefill", "full", "--peers", peers]) == 0
    out, err = capsys.readouterr()
    wanted = (
        "missing: absent (here): the package is not installed; pip install nowhere",
        f"missing: present (gone): there is no {tmp_path / 'gone'}; give present=PATH, a folder that `make` makes",
        "missing: present: no path was given; give present=PATH, a folder that `make` makes",
    )
    assert all(line in out and line in err for line in wanted)


def test_a_peer_takes_turns_in_a_process_of_its_own(bundle, tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    settings = Settings(bundle, (8,), 3, 1, 1, ("full",), (("transformers", tmp_path / "hf"),))
    said: list[str] = []
    report, samples = measure(settings, said.append)
    assert [sample.label for sample in samples] == ["pop-export, full prefill", "transformers (hf)"]
    assert all(len(sample.run.step_ms) == 2 and len(sample.run.tokens) == 3 for sample in samples)
    (ratio,) = report["ours_over_peers"]
    ours, theirs = (sample.run for sample in samples)
    assert ratio["first_token"] == pytest.approx(ours.first_ms / theirs.first_ms)
    exact, other = report["agreement"]
    assert (exact["top1"], exact["common_tokens"]) == (1, agreement.NUM_NEW)
    assert other["label"] == "transformers (hf)" and other["top1"] < agreement.LEAST_TOP1  # it is another model
    assert any(line.startswith("transformers (hf): ") and "is it the same model?" in line for line in said)
    assert report["engines"]["transformers (hf)"]["version"] == f"transformers {transformers.__version__}"
    assert "transformers (hf)" in table(report)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt-lengths", "8,x"], "--prompt-lengths: expected numbers such as 512,1024, found '8,x'"),
        (["--prompt-lengths", "0"], "--prompt-lengths: expected at least 1, found 0"),
        (["--prompt-lengths", "61", "--new-tokens", "4"], "--prompt-lengths: expected at most 60 tokens"),
        (["--repeat", "0"], "--repeat: expected at least 1, found 0"),
        (["--threads", "0"], "--threads: expected at least 1, found 0"),
        (["--threads", "100000"], "--threads: expected at most "),
        (["--prefill", "half"], "prefill: expected 'pop' or 'full', found 'half'"),
        (["--boundary-tokens", "0"], "boundary_tokens: expected at least 1"),
        (["--sink-tokens", "-1"], "sink_tokens: expected at least 0"),
        (["--ep", "npu"], "--ep: expected one of cpu, cuda"),
        (["--ep", "cpu", "--device", "1"], "--device: expected 0, found 1"),
        (["--ep", "tensorrt"], "--ep tensorrt: expected a bundle of dialect standard, found ort"),
        (["--clock", "cpu", "--threads", "2"], "--clock cpu: expected --threads 1"),
        (["--prefill", "pop,pop"], "--prefill: expected each entry once, found one twice; drop it"),
        (["--prompt-lengths", "8,20,8"], "--prompt-lengths: expected each entry once"),
        (["--peers", "transformers=a/hf,transformers=./a/hf"], "--peers: expected each entry once"),
        (
            ["--csv", "/proc/none/samples.csv"],
            "--csv /proc/none/samples.csv: expected a file that can be written, found: ",
        ),
        (["--csv", "/"], "--csv /: expected a file that can be written, found: Is a directory; choose another"),
        (["--plot", "/proc/none/p.png"], "--plot /proc/none/p.png: expected a file that can be written, found: "),
        (["--plot", "times.xyz"], "--plot times.xyz: expected a name that ends in one of "),
        (["--peers", "vllm=x"], "--peers: expected some of transformers, onnxruntime-genai, openvino-genai, llama-cpp"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_work(bundle, capsys, flags, message):
    assert main([str(bundle), *SMALL, *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, message in err, "loading" in err) == ("", True, False)


def test_a_provider_that_is_missing_ends_with_exit_code_4_and_the_line_that_installs_it(bundle, capsys):
    assert main([str(bundle), *SMALL, "--ep", "cuda"]) == 4
    out, err = capsys.readouterr()
    assert out == "" and "loading" not in err and err.count("\n") == 1
    assert "--ep cuda --device 0: expected CUDAExecutionProvider" in err and "pip install 'pop-export[gpu]'" in err


def test_the_provider_is_in_the_report_with_the_nodes_that_it_runs(bundle, capsys):
    assert main([str(bundle), *SMALL, "--ep", "cpu", "--device", "0", "--prefill", "full", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ep"], report["device"]) == ("cpu", 0)
    nodes = report["engines"]["pop-export"]["nodes_by_provider"]
    assert {name for counts in nodes.values() for name in counts} == {"CPUExecutionProvider"}


def test_an_engine_that_was_not_compiled_is_asked_for(bundle, capsys):
    assert main([str(bundle), *SMALL, "--engine"]) == 4
    assert "expected an engine for --ep cpu" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_in_the_end_costs_no_figures(bundle, capsys, monkeypatch, tmp_path):
    def full_disk(path, samples):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("pop_runtime.bench.cli.write_csv", full_disk)
    (tmp_path / "kept.png").write_text("of an earlier run")
    flags = ["--csv", str(tmp_path / "samples.csv"), "--plot", str(tmp_path / "kept.png"), "--prefill", "full"]
    assert main([str(bundle), *SMALL, *flags]) == 2
    out, err = capsys.readouterr()
    assert "pop-export, full prefill" in out and "1 threads, 2 rounds" in out
    assert "samples.csv: expected a file that can be written, found: No space left on device" in err.splitlines()[-1]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"kept.png": "of an earlier run"}


def test_a_stdout_that_cannot_be_written_costs_no_files(bundle, tmp_path):
    command = [sys.executable, "-m", "pop_runtime.bench.cli", str(bundle), *SMALL, "--csv", str(tmp_path / "s.csv")]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "pop-bench: error: stdout: cannot write: No space left on device"
    assert len((tmp_path / "s.csv").read_text().splitlines()) == 1 + 2 * 2 * 2


def test_an_altered_bundle_is_not_measured(bundle, capsys, tmp_path):
    folder = shutil.copytree(bundle, tmp_path / "bundle")
    content = bytearray((folder / "weights.bin").read_bytes())
    content[-1] ^= 1
    (folder / "weights.bin").write_bytes(content)
    assert main([str(folder), *SMALL]) == 3
    assert "weights.bin: expected sha256" in capsys.readouterr().err


def test_times_are_shown_where_the_system_does_not_say_the_memory(bundle):
    report, _ = measure(Settings(bundle, prompt_lengths=(8,), num_new=2, num_rounds=1, threads=1), lambda text: None)
    for memory in (report["memory"]["one_graph"], report["memory"]["both_graphs"], *report["engines"].values()):
        memory.update(proportional_bytes=None, peak_bytes=None)
    report["memory"]["both_over_one"] = None
    assert "memory: both graphs not known on this system, the decode graph alone not known" in table(report)


def test_a_worker_that_died_while_it_waited_is_named(tmp_path, bundle):
    spec = measuring._bundle_spec(Settings(bundle), threads=1)
    worker = Worker(spec)
    worker._process.kill()
    worker._process.wait()
    with pytest.raises(BackendError, match=r"bundle \(.*\): expected an engine that runs, found: .*exit status -9"):
        worker.ask()


@pytest.mark.parametrize(
    "content", ['{"work": {"full": {}, "pruned": {}}}', '{"work": {"full": {"linear": 1}}}', '{"work": 3}', "[]", "{"]
)
def test_a_report_of_another_shape_is_said_and_no_limit(bundle, capsys, tmp_path, content):
    folder = shutil.copytree(bundle, tmp_path / "bundle")
    (folder / "report.json").write_text(content)
    assert main([str(folder), *SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.count("report.json: expected the work of both prefills as pop-export counts it, found ") == 1
    assert [ratio["limit"] for ratio in json.loads(out)["pruned_against_full"]] == [None, None]


def test_peers_of_equal_last_names_keep_their_own_lines():
    peers = [("llama-cpp", Path("q4/model.gguf")), ("llama-cpp", Path("q8/model.gguf")), ("transformers", Path("a/hf"))]
    found = measuring.labelled(peers)
    assert found == dict(
        zip(("llama-cpp (q4/model.gguf)", "llama-cpp (q8/model.gguf)", "transformers (hf)"), peers, strict=True)
    )
    lines, specs = measuring._lines(Settings(Path("out")), 1, found)
    assert [line.label for line in lines[2:]] == list(found)
    assert [specs[label]["path"] for label in found] == ["q4/model.gguf", "q8/model.gguf", "a/hf"]


def test_a_plot_without_matplotlib_is_refused_before_work(bundle, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([str(bundle), *SMALL, "--plot", str(tmp_path / "p.png")]) == 4
    assert "--plot: expected the package matplotlib, found none; pip install matplotlib" in capsys.readouterr().err


def test_an_engine_that_does_not_load_ends_in_one_line(tmp_path):
    spec = measuring._bundle_spec(Settings(tmp_path), threads=1)
    with pytest.raises(BackendError, match=r"bundle \(.*\): expected an engine that runs, found: .*manifest.json"):
        Worker(spec)


def test_a_process_that_dies_leaves_its_last_line(tmp_path):
    with pytest.raises(BackendError, match=r"found: KeyError: 'nonsense' \(exit status 1\)"):
        Worker({"engine": "nonsense", "path": str(tmp_path), "threads": 1})


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_bundle_answers_with_one_time_per_token(bundle, clock):
    run = timed(BundleEngine(bundle, 1), PROMPT, 5, "pop", clock)
    assert run.first_ms > 0 and len(run.step_ms) == 4
    generation = pop_runtime.load(bundle, threads=1).generate(PROMPT, max_new_tokens=5, ignore_eos=True, temperature=0)
    list(generation)
    assert list(run.tokens) == generation.token_ids


def test_engines_take_turns_and_the_first_round_does_not_count():
    asked: list[tuple[str, int]] = []

    def ask(line: Line, prompt: list[int]) -> Run:
        asked.append((line.label, len(prompt)))
        return Run(float(len(asked)), (1.0, 9.0, 2.0), (1, 2, 3, 4))

    samples = run_rounds(ask, [Line("a", "a"), Line("b", "b")], [prompt_of(4, V), prompt_of(6, V)], 2)
    assert asked == [("a", 4), ("b", 4), ("a", 6), ("b", 6)] * 3
    assert [sample.run.first_ms for sample in samples] == [5, 6, 7, 8, 9, 10, 11, 12]
    first = figures_of(samples)[0]
    assert (first.label, first.first_ms, first.step_ms) == ("a", Spread(7, 5, 9), Spread(2, 2, 2))
    assert first.tokens_per_second == 500


def test_windows_can_be_other_ones_than_the_bundles(bundle):
    prompt = prompt_of(30, V)
    tokens = {
        boundary: timed(BundleEngine(bundle, 1, boundary_tokens=boundary), prompt, 8, "pop", "wall").tokens
        for boundary in (None, 1, 30)
    }
    exact = timed(BundleEngine(bundle, 1), prompt, 8, "full", "wall").tokens
    assert tokens[30] == exact != tokens[1]
    assert tokens[None] == tokens[measuring.read_manifest(bundle).windows.boundary_tokens]


def test_pruned_against_full_is_the_median_of_the_rounds_own_ratios(bundle):
    times = {"pop": [10.0, 20.0, 40.0], "full": [20.0, 30.0, 60.0]}
    samples = [
        Sample(measuring._line(kind), 8, index, Run(ms, (), (1,)))
        for kind in times for index, ms in enumerate(times[kind], 1)
    ]  # fmt: skip
    (found,) = measuring._ratios(Settings(bundle, (8,)), lambda num_tokens: None, samples)
    assert found == {"num_prompt": 8, "measured": 1.5, "limit": None}  # of 2, 1.5 and 1.5


def test_ratios_compare_the_times_of_one_round():
    times = {("ours", 1): 10.0, ("theirs", 1): 20.0, ("ours", 2): 90.0, ("theirs", 2): 100.0, ("ours", 3): 3.0,
             ("theirs", 3): 4.0}  # fmt: skip
    samples = [
        Sample(Line(name, name), 8, index, Run(ms, (ms / 5, ms / 5), (1, 2, 3))) for (name, index), ms in times.items()
    ]
    (ratio,) = ratios_to_peers(samples, "ours")
    assert (ratio.label, ratio.peer, ratio.num_prompt) == ("ours", "theirs", 8)
    assert (ratio.first_token, ratio.per_token) == pytest.approx((0.75, 0.75))  # of 0.5, 0.9 and 0.75


def test_agreement_counts_first_tokens_and_those_in_common():
    answers = {"full": (1, 2, 3, 4), "same": (1, 2, 3, 4), "late": (1, 2, 9, 4), "other": (7, 2, 3, 4)}

    def ask(line: Line, prompt: list[int], num_new: int) -> Run:
        assert num_new == agreement.NUM_NEW
        return Run(1.0, (), answers[line.label] if len(prompt) > 1 else answers["full"])

    lines = [Line(name, name) for name in ("same", "late", "other")]
    found = agreement.agreement_of(ask, lines, Line("full", "full"), [[5], [5, 6]])
    assert [(entry.top1, entry.common_tokens) for entry in found] == [(1, 4), (1, 3), (0.5, 2)]


def test_probes_are_prefixes_that_fit_the_model():
    probes = agreement.probes_of(range(1000), 64)
    assert probes[-1] == list(range(60)) and len(probes[0]) == 30
    assert len(probes) == agreement.NUM_PROBES and all(probe == list(range(len(probe))) for probe in probes)
    assert agreement.probes_of([4], 64) == [[4]]
    assert len(agreement.probes_of(range(1000), 8192)[-1]) == agreement.MOST_TOKENS


def test_prompts_are_the_same_every_time_and_within_the_vocabulary():
    assert prompt_of(30, V) == prompt_of(30, V)
    assert all(0 <= token < V for token in prompt_of(500, V))
    assert len(prompt_of(5, 2)) == 5


def test_the_limit_counts_work_and_windows():
    full, pruned = PromptWork(100.0, 1.0), PromptWork(50.0, 0.5)
    assert speedup_limit(full, pruned, Windows(0, 1), 10_000_000) == pytest.approx(2)
    assert speedup_limit(full, pruned, Windows(4, 6), 10) == pytest.approx(1)
    # 4 tokens, the first and the last at full depth; they attend to 1, 2, 3 and 4 tokens
    in_full = 4 * 100 + (1 + 2 + 3 + 4)
    as_a_turn = (100 + 1) + (2 * 50 + (2 + 3) * 0.5) + (100 + 4)
    assert speedup_limit(full, pruned, Windows(1, 1), 4) == pytest.approx(in_full / as_a_turn)


def test_the_limit_is_read_from_the_report_of_the_bundle(tmp_path, bundle):
    manifest = measuring.read_manifest(bundle)
    work = {"full": {"linear": 4.0, "attention": 0.0}, "pruned": {"linear": 2.0, "attention": 0.0}}
    (tmp_path / "report.json").write_text(json.dumps({"work": work}), encoding="utf-8")
    num_full = manifest.windows.sink_tokens + manifest.windows.boundary_tokens
    wanted = 4 * 40 / (4 * num_full + 2 * (40 - num_full))
    assert measuring._limit(tmp_path, manifest.windows, pytest.fail)(40) == pytest.approx(wanted)
    assert measuring._limit(Path("nowhere"), manifest.windows, pytest.fail)(40) is None
