"""A server whose core runs in another process, over a fake model: `python FILE 'JSON OPTIONS'`.

Options: those of `support_process.build`, "serve" (fields of `ServeConfig`), "restarts",
"max_restarts" (how often, instead of the usual number).
"""

from __future__ import annotations

import functools
import json
import sys

import support_process


def main() -> int:
    """Serve until a signal."""
    from girih.kernels.base.errors import GirihError
    from girih.runtime.client import supervisor
    from girih.runtime.client.client import CoreClient
    from girih.serve.config import ServeConfig
    from girih.serve.http.fleet import ApiFleet, FleetSettings
    from girih.serve.http.server import GirihServer

    options = json.loads(sys.argv[1])
    restarts = options.pop("restarts", False)
    supervisor.MAX_RESTARTS = options.pop("max_restarts", supervisor.MAX_RESTARTS)
    policy = options.get("policy", "fcfs")
    config = ServeConfig(port=0, **options.pop("serve", {}))
    build = functools.partial(support_process.build, **options)
    server: ApiFleet | GirihServer
    try:
        if config.api_processes > 1:
            server = ApiFleet(build, FleetSettings(config, policy=policy, restarts=restarts))
        else:
            server = GirihServer(
                CoreClient(supervisor.ProcessTransport(build, restarts)),
                config,
                policy=policy,
                announce=lambda line: print(line, flush=True),
            )
        return server.run()
    except GirihError as error:
        print(f"error: {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
