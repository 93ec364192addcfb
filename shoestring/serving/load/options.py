"""What can be asked of a load test. Nothing heavy is imported."""

from __future__ import annotations

from shoestring.core.command_line.arguments import argument, dataclass
from shoestring.core.errors import Mistake


@dataclass(frozen=True)
class LoadCommand:
    url: str = argument("URL", "where requests are posted, such as http://127.0.0.1:8000/answer", positional=True)
    data: str = argument("FILE", "a body a line, sent one after the other and again from the first", required=True)
    rate: str | float = argument("N", "requests a second, which come at random (default 10)", 10.0, read=float)
    seconds: str | float = argument("N", "how long requests come (default 10)", 10.0, read=float)
    connections: str | int = argument("N", "most connections (default 256)", 256, read=int)
    token: str | None = argument("TEXT", "sent as Authorization: Bearer TEXT")
    insecure: bool = argument("", "believe any certificate", False)
    seed: str | int = argument("N", "of the times at which requests come", 0, read=int)

    def check(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise Mistake(f"{self.url} is no address: it begins with http:// or https://")
        for name, value, most in (
            ("rate", self.rate, 1e6),
            ("seconds", self.seconds, 86400),
            ("connections", self.connections, 65536),
        ):
            if not 0 < float(value) <= most:
                raise Mistake(f"--{name} {value}: give a number above 0, {most:g} at most")
        if float(self.rate) * float(self.seconds) > 1e7:
            raise Mistake(
                f"{float(self.rate) * float(self.seconds):,.0f} requests are more than a test holds: give fewer --seconds"
            )
