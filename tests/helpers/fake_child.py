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
    """`work(tell, jobs)` is its life, for one job after another, until it raises Crash or Hang."""

    def __init__(self, work=None):
        self._work, self.code, self.killed, self._told = work, None, False, [{"ready": True}]

    def send(self, job):
        def tell(**message):
            if "ready" not in message:
                self._told.append(message)

        try:
            self.code = self._work(tell, iter([job])) or None
        except Crash:
            self.code = -11
        except Hang:
            pass

    def poll(self):
        return self.code

    def messages(self):
        told, self._told = self._told, []
        return json.loads(json.dumps(told))

    def kill(self):
        self.killed = True

    def last_words(self):
        return "its last line"
