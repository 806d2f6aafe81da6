"""Download GSM8K or SVAMP into dataset/, or go on with a download that broke off.

uv run -m alignment.download --task svamp"""

from pathlib import Path

from alignment.args import DownloadArgs, parse
from alignment.system.errors import run_command


def main() -> None:
    args = parse(DownloadArgs)
    from alignment.data.tasks import published

    folder = args.folder or published.FOLDER.format(args.task)
    published.download(args.task, Path(folder), args.source)
    print(f"{published.PUBLISHED[args.task]['title']} is in {folder}/")


if __name__ == "__main__":
    run_command(main)
