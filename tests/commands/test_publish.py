"""What `alignment.publish` makes of a run's folder. Nothing here reaches a network."""

import inspect
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from alignment import publish
from alignment.system.manifests import write_manifest
from tests.command_line import exit_code


@pytest.fixture
def run(tmp_path):
    """A finished run's folder with a made-up model."""
    run = tmp_path / "run"
    (run / "final").mkdir(parents=True)
    (run / "summary.json").write_text("{}")
    with write_manifest(run / "final"):
        (run / "final" / "model.safetensors").write_bytes(b"weights")
        (run / "final" / "README.md").write_text("card")
    (run / "final" / "notes.txt").write_text("not of the model")
    return run


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub, which takes no call that HfApi would not take."""
    calls, repository = [], SimpleNamespace(private=True)

    class Api:
        def __getattr__(self, name):
            def call(*arguments, **options):
                inspect.signature(getattr(HfApi, name)).bind(self, *arguments, **options)
                calls.append((name, arguments, options))
                return repository if name == "repo_info" else "address"

            return call

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return SimpleNamespace(calls=calls, repository=repository)


def published(monkeypatch, capsys, run, *flags: str) -> tuple[int, str, str]:
    """The exit code of the command, and what it printed."""
    code = exit_code(monkeypatch, publish.main, "publish", "--run", str(run), *flags)
    return code, *capsys.readouterr()


def test_a_dry_run_lists_the_files_of_the_manifest_and_calls_nothing(run, monkeypatch, capsys, hub):
    code, out, _ = published(monkeypatch, capsys, run, "--repo", "me/tiny", "--dry_run")
    assert code == 0 and hub.calls == []
    assert out.splitlines()[:2] == [
        "              4  README.md",
        "              7  model.safetensors",
    ]
    assert out.splitlines()[2].endswith("  manifest.sha256.json") and "notes.txt" not in out


def test_an_upload_sends_what_the_manifest_names(run, monkeypatch, capsys, hub):
    code, out, _ = published(monkeypatch, capsys, run, "--repo", "me/tiny", "--private")
    assert code == 0 and out.endswith("published: address\n")
    assert hub.calls[0] == ("create_repo", ("me/tiny",), {"private": True, "exist_ok": True})
    name, _, options = hub.calls[-1]
    assert name == "upload_folder" and options["folder_path"] == run / "final"
    assert options["allow_patterns"] == ["README.md", "model.safetensors", "manifest.sha256.json"]
    hub.repository.private, hub.calls[:] = False, []
    code, _, error = published(monkeypatch, capsys, run, "--repo", "me/tiny", "--private")
    assert code == 2 and "me/tiny exists and is public" in error and hub.calls[-1][0] == "repo_info"


def test_what_the_hub_refuses_is_one_line(run, monkeypatch, capsys):
    def refuse(*arguments, **options):
        raise huggingface_hub.errors.LocalTokenNotFoundError("no\ntoken")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    code, _, error = published(monkeypatch, capsys, run, "--repo", "me/tiny")
    assert (
        code == 2 and error == "error: --repo me/tiny: no token; `hf auth login` stores a token\n"
    )


def test_a_connection_that_fails_is_one_line(run, monkeypatch, capsys):
    class ConnectError(Exception):
        """As the transport's of the hub's library, which is no OSError."""

    def refuse(*arguments, **options):
        raise ConnectError("no route")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    code, _, error = published(monkeypatch, capsys, run, "--repo", "me/tiny")
    assert (
        code == 2 and error.startswith("error: --repo me/tiny: no route") and error.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("change", "repo", "message"),
    [
        (
            lambda run: (run / "final" / "model.safetensors").write_bytes(b"weighty"),
            "me/a",
            "model.safetensors has changed",
        ),
        (lambda run: (run / "final" / "README.md").unlink(), "me/a", "README.md is missing"),
        (
            lambda run: (run / "summary.json").unlink(),
            "me/a",
            "must be the folder of a finished run",
        ),
        (lambda run: shutil.rmtree(run / "final"), "me/a", "must be the folder of a finished run"),
        (lambda run: shutil.rmtree(run), "me/a", "must be the folder of a finished run"),
        (lambda run: None, "me/a/b", "--repo me/a/b"),
    ],
)
def test_what_is_not_published(change, repo, message, run, monkeypatch, capsys, hub):
    change(run)
    for flags in ([], ["--dry_run"]):
        code, _, error = published(monkeypatch, capsys, run, "--repo", repo, *flags)
        assert code == 2 and message in error and error.count("\n") == 1
    assert hub.calls == []
