"""Player: a slider that moves by itself, and a button that starts and stops it."""

import threading

import ipywidgets as W

from grpo_core.lab.panel import button

SECONDS = 0.8  # From one step to the next.


class Player:
    """Plays a slider through its places 0 … last.

    Attributes:
        button: Play; while it plays, Stop.
    """

    def __init__(self, slider: W.Widget, last: int):
        self.slider, self.last, self._stop = slider, last, None
        self.button = button("Play", self.toggle, "step by itself, or stop")

    def move(self, by: int) -> None:
        self.slider.value = min(self.last, max(0, self.slider.value + by))

    def toggle(self) -> None:
        """Step until the end, from the start if it is there already; pressed again, stop."""
        if self._stop is not None:
            self.halt()
            return
        self._stop = threading.Event()
        self.button.description = "Stop"
        self.slider.value = 0 if self.slider.value == self.last else self.slider.value
        threading.Thread(target=self._step_by_itself, args=(self._stop,), daemon=True).start()

    def _step_by_itself(self, stop: threading.Event) -> None:
        """Each run has an event of its own: a new Play must not revive a thread that was told to stop."""
        while self.slider.value < self.last and not stop.wait(SECONDS):
            self.move(+1)
        if not stop.is_set():
            self.halt()

    def halt(self) -> None:
        if self._stop is not None:
            self._stop.set()
        self._stop, self.button.description = None, "Play"
