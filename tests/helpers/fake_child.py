"""Child processes that live in this one, for what supervises such: nothing is started."""

import json


class Crash(BaseException):
    """The end of a process, by SIGSEGV."""


class Hang(BaseException):
    """A call that never returns."""


class Clock:
    """A module's `time`, which passes only where somebody sleeps, by `step` seconds if given."""

    now, step = 0.0, None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += self.step or seconds


class FakeChild:
    """Tells messages of a plan, one at a look; a number is the exit code.

    `work(tell, jobs)` adds those of each job, until it raises an error, Crash or Hang.
    """

    def __init__(self, work=None, plan=({"ready": True},)):
        self._work, self._plan, self.sent, self.killed = work, [*plan], [], False

    def send(self, job):
        self.sent.append(job)
        try:
            if self._work is not None:
                self._work(self._tell, iter([job]))
        except Crash:
            self._plan.append(-11)
        except Hang:
            pass
        except Exception:
            self._plan.append(1)

    def _tell(self, **message):
        if "ready" not in message:
            self._plan.append(json.loads(json.dumps(message)))

    def poll(self):
        return self._plan[0] if self._plan and isinstance(self._plan[0], int) else None

    def messages(self):
        return [self._plan.pop(0)] if self._plan and isinstance(self._plan[0], dict) else []

    def kill(self):
        self.killed = True

    def last_words(self):
        return "its last line"
