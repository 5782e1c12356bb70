// Words of services, made into sentences for people.

const SERVICES: Record<string, string> = {
  store: "The store",
  algorithm: "The algorithm service",
  llm_proxy: "The LLM proxy",
  exchange: "The gradient exchange",
};
/** Roles of people; the others are those of Fulmen's own processes. */
const PEOPLE = new Set(["reader", "client", "admin"]);
/** What a field is in, which a person knows from the page. */
const ENVELOPE = /^(project|rollouts?(\[\d+\])?|training_run|annotation|token|inputs)\.(?=.)/;
const VERB = /^(is|are|was|were|has|have|must|may|can|cannot|does|do|needs?|belongs?|names?|exceeds?|differs?)\b/;

export function capitalized(text: string): string {
  // A name, such as `projects/a`, stays as it is.
  return /^[\w-]+\//.test(text) ? text : text.charAt(0).toUpperCase() + text.slice(1);
}

/** Names a service by its package: `fulmen.store.v1.RolloutService` is "The store". */
export function serviceWords(service: string): string {
  return SERVICES[/^fulmen\.(\w+)\./.exec(service)?.[1] ?? ""] ?? "The console";
}

/** Returns a service's message without names of rpcs, messages and settings, and as a sentence. */
export function plain(said: string): string {
  const text = said
    .replace(/\s*\((?:[a-z]+(?:_[a-z]+)+|[A-Z][a-z]+(?:[A-Z][a-z]+)+)\)/g, "")
    .replace(/\bfulmen\.\w+\.v\d+\.[\w./]+\w/g, "this")
    .trim();
  return text && sentence(capitalized(text));
}

/** Returns a problem of a request, `page_size: is negative`, as a sentence: "Page size is negative." */
export function inWords(violation: string): string {
  const at = violation.indexOf(": ");
  const field = at > 0 ? violation.slice(0, at) : "";
  const description = at >= 0 ? violation.slice(at + 2) : violation;
  // `settings.steps`, `rollouts[2].input`: nothing else looks like the name of a field.
  if (!/^[\w.[\]-]+$/.test(field)) return sentence(capitalized(field ? violation : description));
  const words = field
    .replace(ENVELOPE, "")
    .replace(/\[(\d+)\]/g, (_, index: string) => ` ${Number(index) + 1}`)
    .replace(/[._]/g, " ");
  return sentence(capitalized(`${words}${VERB.test(description) ? "" : ":"} ${description}`));
}

/** Says what a token lacks. `said` is the message of the service, which names rpc and roles. */
export function permissionWords(said: string, role: string, method: string): string {
  const doing = /^(Get|List|Watch|Count|Query|Read)/.test(method) ? "see" : "do";
  const roles = /Use a token of role ([a-z_, ]+)\./.exec(said)?.[1]?.split(", ");
  if (roles) {
    const people = roles.filter((each) => PEOPLE.has(each)).sort((a) => (a === "admin" ? 1 : -1));
    if (!people.length) return `Only services of Fulmen may ${doing} this.`;
    const yours = role ? `; the role of yours is ${role}` : "";
    return `You may not ${doing} this. It needs a token whose role is ${people.join(" or ")}${yours}. Sign in with another token, or ask an administrator.`;
  }
  if (said.includes("affects all projects"))
    return `You may not ${doing} this: it affects all projects, but your token is for one. Ask an operator.`;
  const project = /Use a token of (projects\/[\w-]+)/.exec(said)?.[1];
  if (said.includes("another project"))
    return `You may not ${doing} this: your token is for another project. Sign in with a token for ${project ?? "this one"}.`;
  return plain(said);
}

function sentence(text: string): string {
  return /[.!?…:]$/.test(text) ? text : `${text}.`;
}
