// Asks regularly, and tells what fails.

import { Refused } from "./connection.js";

/** Asks regularly while the window is visible, and at once when it becomes visible or is asked to. */
export class Poll {
  #interval;
  #work;
  #report;
  #timer = null;
  #isRunning = false;
  #isAskedAgain = false;

  /** `report` gets this and an error, or null if there is none. */
  constructor(interval, work, report) {
    [this.#interval, this.#work, this.#report] = [interval, work, report];
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.now(); });
  }

  async now() {
    // What is asked now may have begun before the change that the caller waits for.
    this.#isAskedAgain = this.#isRunning;
    if (this.#isRunning) return;
    clearTimeout(this.#timer);
    this.#isRunning = true;
    try {
      if (!document.hidden) {
        await this.#work();
        this.#report(this, null);
      }
    } catch (error) {
      this.#report(this, error);
      if (error instanceof Refused) return;
    } finally {
      this.#isRunning = false;
    }
    this.#timer = setTimeout(() => this.now(), this.#isAskedAgain ? 0 : this.#interval);
  }
}
