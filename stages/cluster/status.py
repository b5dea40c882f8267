"""`rlhf cluster status`: who is on the cluster, with what, since when."""

import time

from stages.cluster import head


def print_status() -> int:
    """Print a table of the warm actors of the local head. Returns the exit code: 0, or 1 when no head runs."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    cluster = head.find()
    if cluster is None:
        console.print("no cluster runs; `rlhf cluster up` starts one, and so does every run")
        return 1
    rows = head.status()
    table = Table(
        title=f"cluster {cluster.address}, up {_age(cluster.started)}, {cluster.memory_mb():,.0f} MB in all", title_justify="left"
    )
    for column in ("role", "holds", "since", "busy with", "node", "pid", "MB", "code"):
        table.add_column(column, justify="right" if column in ("pid", "MB") else "left", overflow="fold")
    for row in sorted(rows, key=lambda row: row["name"]):
        holds = "\n".join(f"{slot}: {state}" for slot, state in sorted(row["holds"].items()))
        since = "" if row["since"] is None else f"{_age(row['since'])} ago"
        memory = f"{row['memory_mb']:,.0f}"
        table.add_row(row["role"], holds, since, row["busy"], row["node"], str(row["pid"]), memory, row["code_id"][:12])
    console.print(table)
    console.print(f"Ray's state API: {cluster.dashboard} (token in {head.token_path()})", soft_wrap=True)
    return 0


def _age(moment: float) -> str:
    seconds = max(0, int(time.time() - moment))
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
