"""The folder that `prepare` writes to: whose it is, what of it is finished, and how the end product comes about.

Until everything is there it lies in FOLDER/unfinished, so nothing has its final name too early:

    unfinished/plan.json            what decides the output; another one is refused
    unfinished/tokenizer.json       where one was trained
    unfinished/00007.json           unit 7 is done, with train-00007.bin and validation-00007.bin beside it

Then the shards move up, and plan.json (with what is known of every unit) and manifest.json are written.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from angpt_jax import json_text, links
from angpt_jax.data.prepared import CHECKED, TOKENIZER, Manifest, Prepared, damage, open_prepared, write_manifest
from angpt_jax.data.shards import Shard
from angpt_jax.data.tokenizer import Tokenizer
from angpt_jax.data.tokenizer_files import load_tokenizer
from angpt_jax.data.work import Done
from angpt_jax.errors import StorageError, UserError
from angpt_jax.files import write_whole

UNFINISHED = "unfinished"
PLAN = "plan.json"
_LOCK = "lock"
Facts = dict[str, Any]


class Workspace:
    """FOLDER for the plan that `facts` describe; `done` holds the units that are finished and whole."""

    def __init__(self, folder: Path, facts: Facts):
        self.folder, self.facts = folder, facts
        self.unfinished = folder / UNFINISHED
        self.done: dict[int, Done] = {}
        self._is_new = not folder.exists()

    def check(self) -> None:
        """Refuses a folder that holds anything but this plan; changes nothing."""
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return
        except OSError as error:
            kind = UserError if isinstance(error, NotADirectoryError) else StorageError
            raise kind(f"out: can't be used ({error.strerror}), got {self.folder}; a folder, new or empty") from error
        if leading_out := links.leading_out(self.folder):
            raise UserError(f"out: holds links that lead out of it ({', '.join(leading_out[:3])}), got {self.folder}")
        plans = [plan for plan in (self._plan(self.unfinished), self._plan(self.folder)) if plan is not None]
        ours = {UNFINISHED} if not plans else set(names)
        if others := [name for name in names if name not in ours]:
            raise UserError(f"out: holds other things ({', '.join(others[:3])}), got {self.folder}; a new folder")
        for plan in plans:
            differing = [key for key in self.facts | plan["facts"] if self.facts.get(key) != plan["facts"].get(key)]
            if differing:
                raise UserError(
                    f"out: holds tokens that were prepared with another {', '.join(differing)}, got {self.folder}; "
                    "the same to go on, another folder, or remove it first"
                )

    def load(self) -> None:
        """Finds what is done."""
        finished = self._plan(self.folder)
        if finished is not None:
            units = self._units(finished)
            compare = sum(shard.bytes for done in units.values() for shard in done.shards.values()) <= CHECKED
            self.done = {number: done for number, done in units.items() if self._is_whole(done, compare)}
        for path in sorted(self.unfinished.glob("[0-9]*.json")):
            try:
                done = Done.from_facts(json_text.parsed(path.read_text("utf-8")))
            except (ValueError, KeyError, TypeError):
                continue
            if self._is_whole(done, compare=False):
                self.done[int(path.stem)] = done

    def finished(self) -> Prepared | None:
        """The end product, if it is there and whole."""
        try:
            return open_prepared(self.folder, "out") if self._plan(self.folder) is not None else None
        except UserError:
            return None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The folder with its plan written, for this process alone. If it ends with nothing done, it leaves nothing."""
        try:
            self.unfinished.mkdir(parents=True, exist_ok=True)
            with (self.unfinished / _LOCK).open("w") as lock:
                self._lock(lock.fileno())
                if self._plan(self.unfinished) is None:
                    write_whole(self.unfinished / PLAN, json.dumps({"facts": self.facts}))
                try:
                    yield
                finally:
                    if not self.done:
                        self.discard()
        except OSError as error:
            raise StorageError(
                f"out: can't be written ({error.strerror}), got {self.folder}; a folder that this user may write, on "
                "a disk with room; what is finished stays, run again"
            ) from error

    def tokenizer(self) -> Tokenizer | None:
        """The one that was trained here, if that is finished."""
        finished = self._plan(self.folder)
        if (self.unfinished / TOKENIZER).is_file():
            return load_tokenizer(str(self.unfinished / TOKENIZER), "out")
        if finished is None or not (self.folder / TOKENIZER).is_file():
            return None
        try:
            found = load_tokenizer(str(self.folder / TOKENIZER), "out")
        except UserError:
            return None
        return found if found.fingerprint == finished["tokenizer"] else None

    def save_tokenizer(self, tokenizer: Tokenizer) -> None:
        write_whole(self.unfinished / TOKENIZER, tokenizer.json)

    def finish(self, manifest: Manifest, tokenizer: Tokenizer | None) -> None:
        """Gives everything its final name; a kill in between is mended by the next run."""
        for shard in self._shards():
            if (self.unfinished / shard.file).exists():
                (self.unfinished / shard.file).replace(self.folder / shard.file)
        if tokenizer is not None:
            write_whole(self.folder / TOKENIZER, tokenizer.json)
        units = {str(number): asdict(done) for number, done in sorted(self.done.items())}
        plan = {"facts": self.facts, "tokenizer": manifest.tokenizer["fingerprint"], "units": units}
        write_whole(self.folder / PLAN, json.dumps(plan) + "\n")
        write_manifest(self.folder, manifest)
        shutil.rmtree(self.unfinished)

    def discard(self) -> None:
        """Removes all that is unfinished."""
        shutil.rmtree(self.unfinished, ignore_errors=True)
        if self._is_new and self.folder.is_dir() and not os.listdir(self.folder):
            self.folder.rmdir()

    def _shards(self) -> list[Shard]:
        return [shard for done in self.done.values() for shard in done.shards.values()]

    def _is_whole(self, done: Done, compare: bool) -> bool:
        return all(
            damage(self.unfinished, shard, compare=False) is None or damage(self.folder, shard, compare) is None
            for shard in done.shards.values()
        )

    def _plan(self, folder: Path) -> Facts | None:
        try:
            plan = json_text.parsed((folder / PLAN).read_text("utf-8"))
            if not (isinstance(plan, dict) and isinstance(plan.get("facts"), dict)):
                raise ValueError("it has no facts")
            return plan
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"out: {PLAN} can't be read ({error.strerror}), got {folder}; remove it") from error
        except ValueError as error:
            raise UserError(f"out: {PLAN} is not one of prepare's ({error}), got {folder}; remove it") from error

    def _units(self, plan: Facts) -> dict[int, Done]:
        try:
            return {int(number): Done.from_facts(facts) for number, facts in plan["units"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"out: {PLAN} is not one of prepare's ({error}), got {self.folder}; remove it") from error

    def _lock(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"out: another prepare is at work there, got {self.folder}; wait for it") from error
        except OSError:
            pass  # a file system without locks
