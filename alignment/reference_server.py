"""Serve the log-probs of a frozen reference model over HTTP, from another GPU or another machine than the trainer's.

uv run -m alignment.reference_server --model checkpoints/tiny_sft --device cuda:1

`alignment.policy.reference_model` describes the requests and their answers.
"""

import ipaddress
import socket

from alignment.args import Args, ReferenceServerArgs, parse
from alignment.checks import check_model_path, resolve_model, visible_gpus
from alignment.system.errors import UserError, run_command
from alignment.system.http import REFERENCE_TOKEN, reference_token

# torch takes seconds to load, so it waits until the flags are known to be right.


def bind(host: str, port: int, token: str) -> socket.socket:
    """A socket bound to an address of this machine. Raises `UserError` where it cannot be, or must not without a token."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise UserError(f"--host {host}: there is no such address; write one of this machine, such as 127.0.0.1") from None
    if not token and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        remedy = f"set {REFERENCE_TOKEN} for the server and for the trainer, or take --host 127.0.0.1"
        raise UserError(f"--host {host}: other machines could use it there, so it needs a secret: {remedy}")
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror}; choose others (--port 0: any that is free)") from None


def main() -> None:
    args = parse(ReferenceServerArgs)
    token = reference_token()
    with bind(args.host, args.port, token) as listener:
        check_model_path(args.model, "--model")
        devices = [*(f"cuda:{number}" for number in range(visible_gpus())), "cpu"]
        if args.device not in (None, *devices):
            raise UserError(f"--device {args.device}: this machine has {', '.join(devices)}")
        device = args.device or devices[0]

        import torch

        from alignment.policy.frozen import FrozenModel
        from alignment.policy.loading import compute_dtype
        from alignment.policy.reference_model import ReferenceService

        path, dtype = resolve_model(args.model, Args.output_dir), getattr(torch, compute_dtype(args.dtype, device))
        model = FrozenModel(path, device, dtype)
        service = ReferenceService(args.model, model, token, args.max_pending, args.max_upload_mib << 20)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"reference model {args.model} on {device}: {url}", flush=True)
        service.server.run([listener])


if __name__ == "__main__":
    run_command(main)
