"""Before JAX connects: all processes of a run have come, and are those that were expected.

JAX's own client ends the process without a word that a program could catch when one of them stays away, and it does not
say which. So process 0 first listens on the coordinator's port itself, with plain sockets:

    process n → 0   `angpt_jax PROCESSES PROCESS HOST`
    0 → process n   `go`, or the problem, for each of those that came

and closes it again before JAX's coordinator takes the port.
"""

import contextlib
import ipaddress
import os
import socket
import time

from angpt_jax.errors import UserError
from angpt_jax.processes.membership import join_address, split_address

_RETRY = 0.1  # seconds between two tries to reach process 0
_HELLO = 3.0  # seconds that a process that has connected may take to say who it is
_LONGEST = 4096  # bytes of a message
_GO = "go"


def meet(address: str, processes: int, process: int, seconds: float) -> str:
    """Returns in all processes once all have come, with the address that process 0 is to listen on; a UserError in all
    that came if one has not after `seconds`."""
    host, port = split_address(address) or ("", 0)
    deadline = time.monotonic() + seconds
    resolved = _resolve(address, host, port, deadline)
    if process > 0:
        _report_to_first(address, resolved, f"angpt_jax {processes} {process} {socket.gethostname()}", deadline)
        return address
    asked = split_address(os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", ""))
    listens_on, port = asked or (_listening_host(host, resolved[0]), port)
    with _listen(address, listens_on, port, processes) as server:
        _gather(server, address, processes, deadline, seconds)
    return join_address(listens_on, port)


def _resolve(address: str, host: str, port: int, deadline: float) -> tuple[str, int]:
    """The host's address. In Kubernetes the name of a pod that is about to start may be unknown for a while."""
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][:2]  # type: ignore[return-value]
        except OSError as error:
            if "KUBERNETES_SERVICE_HOST" not in os.environ or time.monotonic() > deadline:
                raise UserError(
                    f"distributed.coordinator: unknown host ({error.strerror}), got {address}; HOST:PORT of process 0"
                ) from error
            time.sleep(1)


def _listening_host(host: str, resolved: str) -> str:
    """What process 0 listens on: the address asked for. But a machine may know its own name as a loopback address,
    where nobody else would reach it: then all."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    is_own_name = ipaddress.ip_address(resolved).is_loopback and host != "localhost"
    return "::" if is_own_name else resolved


def _listen(address: str, host: str, port: int, processes: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(processes)
    except OSError as error:
        server.close()
        raise UserError(
            f"distributed.coordinator: process 0 can't listen there ({error.strerror}), got {address}; a free port on "
            "an address of its host"
        ) from error
    return server


def _gather(server: socket.socket, address: str, processes: int, deadline: float, seconds: float) -> None:
    """Waits for all others, then lets them go on; or tells those that came, and raises, what is wrong."""
    with contextlib.ExitStack() as stack:
        came: dict[int, socket.socket] = {}
        hosts = {0: socket.gethostname()}
        problem = None
        while problem is None and len(hosts) < processes:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peer = stack.enter_context(server.accept()[0])
            except TimeoutError:
                missing = [str(number) for number in range(processes) if number not in hosts]
                problem = (
                    f"distributed.processes: {processes} must come to {address} within {seconds:g} s, got "
                    f"{len(hosts)}; missing: {', '.join(missing)} (--distributed.connect_timeout_seconds waits longer)"
                )
                break
            problem = _admit(peer, processes, came, hosts)
        for peer in came.values():
            with contextlib.suppress(OSError):
                peer.sendall(f"{problem or _GO}\n".encode())
                peer.settimeout(_HELLO)
                peer.recv(1)  # it closes first, so that the port is free at once
    if problem:
        raise UserError(problem)


def _admit(peer: socket.socket, processes: int, came: dict[int, socket.socket], hosts: dict[int, str]) -> str | None:
    """Notes who has come; returns what is wrong with it. A stranger is passed over."""
    words = _receive(peer, _HELLO).split()
    if len(words) != 4 or words[0] != "angpt_jax" or not (words[1] + words[2]).isdecimal():
        return None
    theirs, number, host = int(words[1]), int(words[2]), words[3]
    came[-1 - len(came) if number in hosts else number] = peer  # to be told, also if it is one too many
    if theirs != processes:
        return f"distributed.processes: must be the same in all, got {processes} in process 0 and {theirs} in {number}"
    if number in hosts:
        return f"distributed.process: must differ, got {number} twice, on {hosts[number]} and {host}"
    hosts[number] = host
    return None


def _report_to_first(address: str, resolved: tuple[str, int], hello: str, deadline: float) -> None:
    """Says `hello` to process 0 until it answers."""
    began = time.monotonic()
    while (now := time.monotonic()) < deadline:
        try:
            with socket.create_connection(resolved, timeout=deadline - now) as connection:
                connection.sendall(f"{hello}\n".encode())
                answer = _receive(connection, deadline - time.monotonic() + _HELLO)
        except OSError:
            answer = ""
        if answer == _GO:
            return
        if answer.startswith("distributed."):
            raise UserError(answer)
        time.sleep(_RETRY)
    raise UserError(
        f"distributed.coordinator: process 0 must answer there within {deadline - began:.0f} s, got no answer from "
        f"{address}; start process 0, or open the port (--distributed.connect_timeout_seconds waits longer)"
    )


def _receive(connection: socket.socket, seconds: float) -> str:
    """One line; empty if none comes in time."""
    received = b""
    end = time.monotonic() + seconds
    try:
        while not received.endswith(b"\n") and len(received) < _LONGEST:
            connection.settimeout(max(0.001, end - time.monotonic()))
            part = connection.recv(_LONGEST)
            if not part:
                break
            received += part
    except OSError:
        return ""
    return received.decode(errors="replace").strip()
