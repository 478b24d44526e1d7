// What is in progress and in use: the strip that stays at the top, and the tables of pulls, pushes and transfers and of open models.

import { short } from "./families.js";
import { bytes, duration, names, percent, plural, relative, user } from "./format.js";
import { Table, made, progress } from "./tables.js";

const find = (id) => document.getElementById(id);

/** What is being done by a pull, a push or a transfer. */
const DOING = { pull: "pulling", push: "pushing", transfer: "transferring" };

/** Where the bytes come from, and where a push or a transfer sends them. */
const ends = ({ source, destination }) => (destination ? `${source} → ${destination}` : source);

/** More items would hide the page. */
const MOST = 4;

/** The program that uses the model. */
const engine = (session) => session.engine?.command ?? session.command ?? `process ${session.pid}`;

// By session: sessions with the same name may have different models open.
const sessionId = ({ pid, since, model }) => `${pid} ${since} ${model}`;

export class Work {
  #pulls = [];
  #sessions = [];
  #running = new Map();
  #residency = new Map();
  #problem = "";
  #onEnd;
  #actions;
  #pullTable = new Table(find("pulls"), [
    { title: "Model", text: (pull) => pull.model },
    { title: "Done", cell: (pull) => progress(pull.completed_bytes, pull.total_bytes, `${pull.kind} of ${pull.model}`) },
    { title: "Kind", isWide: true, text: (pull) => pull.kind },
    { title: "Bytes", number: true, isWide: true, text: (pull) => `${bytes(pull.completed_bytes)} of ${pull.total_bytes === null ? "–" : bytes(pull.total_bytes)}` },
    { title: "Speed", number: true, isWide: true, text: (pull) => `${bytes(pull.bytes_per_second)}/s` },
    { title: "Left", number: true, optional: true, isWide: true, text: (pull) => left(pull) || "–" },
    { title: "User", isWide: true, text: user },
    { title: "Since", short: true, isWide: true, text: (pull) => relative(pull.since) },
    { title: "Source", isWide: true, text: ends },
    { title: "Now", isWide: true, text: (pull) => pull.status },
    { title: "Action", optional: true, text: (pull) => (this.#actions.stop(pull) ? "" : "–"), cell: (pull) => this.#actions.stop(pull) ?? "–" },
  ]);
  #sessionTable = new Table(find("sessions"), [
    { title: "Model", text: (session) => session.model, sort: (session) => session.model },
    { title: "Program", text: (session) => engine(session) + (session.container ? ` in ${session.container}` : "") },
    { title: "Process", number: true, isWide: true, text: (session) => { const pid = session.engine?.pid ?? session.pid; return pid > 0 ? String(pid) : "–"; }, sort: (session) => session.pid },
    { title: "User", isWide: true, text: user, sort: user },
    { title: "Since", short: true, isWide: true, text: (session) => relative(session.since), sort: (session) => Date.parse(session.since) },
    { title: "Mapped", number: true, isWide: true, sort: (session) => session.bytes_mapped ?? 0, text: (session) => (session.bytes_mapped === undefined ? "–" : bytes(session.bytes_mapped)) },
    { title: "In memory", number: true, optional: true, isWide: true, text: (session) => this.#inMemory(session) },
    { title: "Action", optional: true, text: (session) => (this.#actions.release(session) ? "" : "–"), cell: (session) => this.#actions.release(session) ?? "–" },
  ]);

  /** `onEnd` is called when a pull, a push or a transfer has ended. `actions` has the buttons that stop a pull and release a session, if there are any, and is told that they were drawn. */
  constructor(onEnd, actions) {
    [this.#onEnd, this.#actions] = [onEnd, actions];
  }

  get sessions() {
    return this.#sessions;
  }

  showPulls({ pulls }) {
    this.#pulls = pulls;
    this.#pullTable.show(pulls);
    find("pulls-section").hidden = pulls.length === 0;
    const running = new Map(pulls.map((pull) => [`${pull.kind} ${pull.model} ${pull.since}`, `${pull.kind} of ${pull.model}`]));
    const begun = [...running].filter(([id]) => !this.#running.has(id)).map(([, work]) => `${work} begins`);
    const ended = [...this.#running].filter(([id]) => !running.has(id)).map(([, work]) => `${work} has ended`);
    this.#running = running;
    // Only changes are read aloud, not every step of the progress.
    if (begun.length + ended.length > 0) find("pulls-live").textContent = [...begun, ...ended].join("; ");
    this.#showStrip();
    if (ended.length > 0) this.#onEnd();
    this.#actions.settle();
  }

  showSessions({ sessions }) {
    this.#sessions = sessions;
    this.#sessionTable.show(sessions);
    find("sessions-section").hidden = sessions.length === 0;
    this.#showStrip();
    this.#actions.settle();
  }

  noteResidency({ sessions }) {
    const told = sessions.filter((session) => session.resident_bytes !== undefined);
    this.#residency = new Map(told.map((session) => [sessionId(session), session]));
    this.showSessions({ sessions });
  }

  showProblem(message) {
    // Set only if it differs: each change of this text is read aloud.
    if (find("problem").textContent !== message) find("problem").textContent = message;
    find("problem").hidden = !message;
    this.#problem = message;
    this.#showStrip();
  }

  /** How much of a model is in memory, of those that are open: a text, or a dash. */
  memoryOf(name) {
    const found = this.#sessions.filter((session) => session.model === name).find((session) => this.#residency.has(sessionId(session)));
    return found ? this.#inMemory(found) : "–";
  }

  /** The programs that have a model open. */
  programsOf(name) {
    return [...new Set(this.#sessions.filter((session) => session.model === name).map(engine))];
  }

  #inMemory(session) {
    const told = this.#residency.get(sessionId(session));
    return told ? `${bytes(told.resident_bytes)} (${percent(told.resident_bytes, told.model_bytes)})` : "–";
  }

  #showStrip() {
    const items = [...this.#pulls.map(pullItem), ...this.#openModels()];
    const more = items.length - MOST;
    if (more > 1) items.splice(MOST, items.length - MOST, made("li", `and ${more} more`));
    find("strip-items").replaceChildren(...items);
    // While the daemon does not answer, they are old.
    find("strip-items").hidden = items.length === 0 || Boolean(this.#problem);
    find("strip").hidden = items.length === 0 && !this.#problem;
  }

  #openModels() {
    const programs = new Map();
    for (const session of this.#sessions) {
      const users = programs.get(session.model) ?? [];
      programs.set(session.model, [...users, engine(session)]);
    }
    return [...programs].map(([model, users]) => {
      const who = [...new Set(users)];
      const times = users.length > who.length ? ` (${plural(users.length, "process", "processes")})` : "";
      return made("li", [made("strong", short(model)), ` open in ${names(who, 2)}${times}`]);
    });
  }
}

function pullItem(pull) {
  const done = pull.total_bytes ? percent(pull.completed_bytes, pull.total_bytes) : bytes(pull.completed_bytes);
  const texts = [done];
  if (pull.bytes_per_second > 0) texts.push(`${bytes(pull.bytes_per_second)}/s`);
  if (left(pull)) texts.push(`${left(pull)} left`);
  if (pull.state === "waiting" || pull.state === "queued") texts.push(pull.status);
  const bar = progress(pull.completed_bytes, pull.total_bytes, `progress of ${pull.model}`);
  return made("li", [`${DOING[pull.kind]} `, made("strong", short(pull.model)), ` ${texts.join(" · ")} `, bar]);
}

/** How long it will take at the speed of now; empty if that is not known. */
function left({ total_bytes: total, completed_bytes: done, bytes_per_second: speed }) {
  return total && speed > 0 && total > done ? duration((total - done) / speed) : "";
}
