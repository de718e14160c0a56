"""``groupio controller``: host the controller of a store in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from groupio.cli.options import JobOption, NodeOption, settings_with
from groupio.cli.output import ANSWER_IS_NO, OK, CommandError, JsonFlag, console, emit_json, text
from groupio.errors import ControllerLost

if TYPE_CHECKING:
    from groupio.controller.service import Service

app = typer.Typer(help="Host the controller of a store without staging memory of its own.")


@app.callback()
def _controller() -> None:
    pass  # makes `run` a subcommand


@app.command("run")
def run(
    store: Annotated[str, typer.Option("--store", help="The store: a path or a file:// URL.")],
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where agents reach it.")
    ],
    coordinator: Annotated[
        str | None,
        typer.Option(
            "--coordinator",
            metavar="etcd://HOST:PORT",
            help="Win the rule there, and stand by while another has it. Default: in the store.",
        ),
    ] = None,
    job: JobOption = None,
    node: NodeOption = None,
    as_json: JsonFlag = False,
) -> int:
    """Rule over the job of a store until Ctrl-C or SIGTERM.

    Agents find it with GROUPIO_CONTROLLER=tcp://HOST:PORT, or with the same etcd://... Exit code 1
    when another controller rules and nothing lets this one stand by, or when the rule is lost.
    With --json, one JSON object a line.
    """
    # Imported here: the rest of the command line does without.
    from groupio.agent.identity import node_name
    from groupio.backend.tree import store_path
    from groupio.controller.discover import Kind, Where, find_controller
    from groupio.controller.service import Duty, Service

    settings = settings_with(node=node, listen=listen)
    where = find_controller(coordinator or "store", {})
    if where.kind not in (Kind.ETCD, Kind.STORE):
        raise CommandError(f"--coordinator {coordinator} is not etcd://HOST:PORT[,HOST:PORT]")
    assert settings.listen is not None
    host, _, port = settings.listen.rpartition(":")
    if not host or not port.isdecimal():
        raise CommandError(f"--listen {listen} has no port; write HOST:PORT, port 0 for any")
    path = store_path(store)
    duty = Duty(
        path=path,
        job=job or path.rpartition("/")[2] or "job",
        node=f"{node_name(settings.node)}.controller" if node is None else node,
        host=host,
        port=int(port),
        where=Where(where.kind, where.address, "--coordinator"),
        file_mode=settings.file_mode,
        backend_bytes_per_s=settings.backend_bytes_per_s,
        job_said=job is not None,
    )
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )

    def tell(word: str, sentence: str) -> None:
        if as_json:
            body = {"state": word, "detail": sentence, "address": service.address}
            emit_json("controller-run", body, indent=None)
        else:
            console().print(f"controller {word}: {text(sentence)}")

    service = Service(duty, tell)
    try:
        asyncio.run(_serve(service))
    except ControllerLost as error:
        sys.stderr.write(f"groupio: {error.message}\n")
        return ANSWER_IS_NO
    return OK


async def _serve(service: Service) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop)
    await service.run()
