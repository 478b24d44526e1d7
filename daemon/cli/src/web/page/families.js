// Which models belong together: those that share a good part of their bytes. Works on the answer to `df` with details.

/** The smallest part of the smaller model that relatives share. */
const LEAST_SHARE = 0.1;

/** One entry per model, with all its names: `{name, others, own, total, shares}`; `shares` has bytes by first name. */
export function distinctModels(usage) {
  const details = new Map(usage.models.map((model) => [model.name, model]));
  return usage.rows.filter((row) => row.kind === "model").map((row) => {
    const others = row.other_names ?? [];
    const model = details.get(row.name) ?? { unique_bytes: row.bytes, shared_bytes: 0 };
    const shares = new Map((model.shared_with ?? []).map((other) => [other.name, other.bytes]));
    for (const other of others) shares.delete(other);
    return { name: row.name, others, own: row.bytes, total: model.unique_bytes + model.shared_bytes, shares };
  });
}

/** Divides the models into families, the largest first: `{id, label, models}`. */
export function families(models) {
  const parent = new Map(models.map((model) => [model.name, model.name]));
  const root = (name) => {
    let top = name;
    while (parent.get(top) !== top) top = parent.get(top);
    parent.set(name, top);
    return top;
  };
  const totals = new Map(models.map((model) => [model.name, model.total]));
  for (const model of models) {
    for (const [other, bytes] of model.shares) {
      const least = Math.min(model.total, totals.get(other) ?? 0) * LEAST_SHARE;
      if (totals.has(other) && bytes >= least && bytes > 0) parent.set(root(model.name), root(other));
    }
  }
  const groups = new Map();
  for (const model of models) {
    const id = root(model.name);
    groups.set(id, [...(groups.get(id) ?? []), model]);
  }
  const sum = (group) => group.models.reduce((bytes, model) => bytes + model.own, 0);
  const made = [...groups].map(([id, members]) => ({ id, label: label(members), models: members.sort((a, b) => a.name.localeCompare(b.name)) }));
  return made.sort((a, b) => sum(b) - sum(a) || a.id.localeCompare(b.id));
}

/** The last part of a name without its tag, and the tag: `["Llama-3.2-1B-GGUF", "Q4_K_M"]`. */
export function parts(name) {
  const last = name.slice(name.lastIndexOf("/") + 1);
  const colon = last.lastIndexOf(":");
  return colon < 0 ? [last, ""] : [last.slice(0, colon), last.slice(colon + 1)];
}

/** The last part of a name and its tag, without the usual one. */
export function short(name) {
  const [last, tag] = parts(name);
  return tag && tag !== "latest" ? `${last}:${tag}` : last;
}

/** What the names of a family have in common. */
function label(models) {
  const names = models.map((model) => parts(model.name)[0]);
  let common = names[0];
  for (const name of names) {
    while (!name.toLowerCase().startsWith(common.toLowerCase())) common = common.slice(0, -1);
  }
  common = common.replace(/[-_.: ]+$/, "");
  return common.length >= 3 ? common : parts(models.reduce((a, b) => (b.total > a.total ? b : a)).name)[0];
}
