// Requests to the command that serves this page.

// Of this window and this port alone, unlike a cookie.
const KEY = "blobd-key";

/** The command refuses this window; only a new link helps. */
export class Refused extends Error {}

/** The command or the daemon does not respond. */
export class Lost extends Error {}

let key = sessionStorage.getItem(KEY);

/** Exchanges the token in the address for the key of the session. */
export async function begin() {
  const token = location.hash.slice(1);
  if (token) {
    // Out of the address, which is shown and kept in the history.
    history.replaceState(null, "", location.pathname);
    const answer = await receive("/session", { method: "POST", body: token });
    if (answer.key) {
      key = answer.key;
      sessionStorage.setItem(KEY, key);
    } else if (!key) {
      throw new Refused(text(answer.error));
    }
  }
  if (!key) throw new Refused("This window has no session. Run `blobd web` and open the link that it prints.");
}

/** Asks a question, such as `df`: one that the daemon answers at `/v1/df`. An error of the daemon is part of the answer. */
export function ask(question) {
  return get(`/api/${question}`);
}

/** Asks the command itself. */
export async function get(path) {
  return accepted(await receive(path, { headers: { "X-Blobd-Key": key } }));
}

/** Sends an action, such as `pin`, that the user has confirmed. An error of the daemon is part of the answer. */
export function act(action, parameters) {
  return post(`/api/${action}`, parameters);
}

/** Sends an action to the command itself. */
export async function post(path, parameters) {
  const headers = { "X-Blobd-Key": key, "Content-Type": "application/json" };
  return accepted(await receive(path, { method: "POST", headers, body: JSON.stringify(parameters) }, ACTION_TIMEOUT));
}

function accepted(answer) {
  if (answer.refused) throw new Refused(text(answer.error));
  return answer;
}

/** What went wrong, and what to do. */
export function text(error) {
  return error.hint ? `${error.message}: ${error.hint}` : error.message;
}

// In milliseconds; the command has slightly shorter ones.
const TIMEOUT = 100_000;
const ACTION_TIMEOUT = 16 * 60_000;

async function receive(path, options, timeout = TIMEOUT) {
  try {
    const response = await fetch(path, { ...options, cache: "no-store", signal: AbortSignal.timeout(timeout) });
    return await response.json();
  } catch {
    throw new Lost("The command `blobd web` does not respond. This page goes on when it does.");
  }
}
