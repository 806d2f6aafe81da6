"""Upload a finished run's model, with its model card, to the Hugging Face hub.

uv run -m alignment.publish --run checkpoints/tiny_grpo_clip_seed0 --repo me/tiny-grpo --dry_run"""

from dataclasses import dataclass
from pathlib import Path

from alignment.args import parse
from alignment.system.errors import UserError, os_error, run_command
from alignment.system.files import read_json
from alignment.system.manifests import MANIFEST, find_damage


@dataclass(frozen=True)
class PublishArgs:
    """Upload the final model of a finished run, with its model card, to the Hugging Face hub: only
    what its manifest names."""

    run: str
    """Folder of the run."""
    repo: str
    """Repository on the hub, OWNER/NAME, which is made where there is none."""
    private: bool = False
    """Make it a private one."""
    dry_run: bool = False
    """List what would be uploaded, and upload nothing."""


def main() -> None:
    args = parse(PublishArgs)
    final = Path(args.run) / "final"
    if not (Path(args.run) / "summary.json").exists() or not final.is_dir():
        raise UserError(
            f"--run {args.run}: must be the folder of a finished run, with a model in final/"
        )
    fault = find_damage(final)
    if fault:
        raise UserError(f"--run {args.run}: final/ is damaged: {fault}")
    names = [*read_json(final / MANIFEST), MANIFEST]
    for name in names:
        print(f"{(final / name).stat().st_size:15,}  {name}")

    from huggingface_hub import utils

    try:
        utils.validate_repo_id(args.repo)
        if not args.dry_run:
            print(f"published: {upload(args, final, names)}")
    except UserError:
        raise
    except Exception as error:
        # The hub, the network, a missing token and a malformed name each raise another class.
        raise UserError(
            f"--repo {args.repo}: {os_error(error)}; `hf auth login` stores a token"
        ) from None


def upload(args: PublishArgs, folder: Path, names: list[str]) -> str:
    """Upload the named files of a folder, and return the repository's address. Raises `UserError`
    where the repository is public and must not be, or else what the hub's client raises."""
    from huggingface_hub import HfApi

    api = HfApi()
    address = api.create_repo(args.repo, private=args.private, exist_ok=True)
    if args.private and not api.repo_info(args.repo).private:
        raise UserError(
            f"--private: {args.repo} exists and is public: make it private on the hub, or name"
            " another"
        )
    api.upload_folder(
        repo_id=args.repo,
        folder_path=folder,
        allow_patterns=names,
        commit_message="A run of alignment",
    )
    return address


if __name__ == "__main__":
    run_command(main)
