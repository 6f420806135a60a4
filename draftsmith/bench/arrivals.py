"""stub"""
from dataclasses import dataclass
@dataclass(frozen=True)
class ClosedLoop:
    concurrency: int
@dataclass(frozen=True)
class OpenLoop:
    times: tuple
def parse_load(text, *, seed, num_prompts):
    kind,_,rest=text.partition(":")
    return ClosedLoop(int(rest))
