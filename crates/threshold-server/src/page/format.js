// Formats numbers, times and names for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const minute = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hour12: false });
// Swedish writes dates as ISO 8601 does, which nobody takes for another day.
const full = new Intl.DateTimeFormat("sv", {
  year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
});

/** A count in full: `12,345`. */
export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));

/** A count in short: `12.3K`. */
export const compact = (value) => (Math.abs(value) < 10_000 ? count(value) : short.format(value));

/** A rate with at most two digits after the point. */
export const rate = (value) => (value >= 100 ? count(value) : String(Math.round(value * 100) / 100));

/** A share: `12.3 %`. */
export const percent = (share) => `${Math.round(share * 1000) / 10} %`;

/** A time in seconds as text: `1.2 ms`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${Math.round(seconds * 1e5) / 100} ms`;
  if (seconds < 120) return `${Math.round(seconds * 10) / 10} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129_600) return `${Math.round(seconds / 360) / 10} h`;
  return `${Math.round(seconds / 8640) / 10} d`;
}

/** The time of day of a moment in milliseconds. */
export const timeOfDay = (millis, seconds = true) => (seconds ? clock : minute).format(new Date(millis));

/** The date and time of a moment in milliseconds. */
export const dateTime = (millis) => (millis === null || millis === undefined ? "–" : full.format(new Date(millis)));

/** When something ends, in Unix seconds; null never does. */
export function until(seconds) {
  if (seconds === null || seconds === undefined) return "no end";
  const left = seconds - Date.now() / 1000;
  return left > 0 ? `in ${duration(left)}` : "over";
}

/** What separates names, or hides in them: as `UserScope::write` encodes it on the server. */
const SEPARATORS = /[\u0000- %/\u007f]/g;
const encoded = (name) => name.replace(SEPARATORS, (character) => `%${character.charCodeAt(0).toString(16).toUpperCase().padStart(2, "0")}`);

/** Writes the key of a user, as operators name it: with its tenant where users belong to tenants. Names are those of events. */
export const userKey = (session, tenant, user) => (session.usersOfTenants ? `${encoded(tenant ?? "")}/${encoded(user)}` : user);

/** Reads the key of a user: its names, as events have them. The tenant is null for a user without one. */
export function userNames(session, key) {
  const at = session.usersOfTenants ? key.indexOf("/") : -1;
  if (at < 0) return { tenant: null, user: key };
  const [tenant, user] = [key.slice(0, at), key.slice(at + 1)].map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      // Not a key: the server says so.
      return part;
    }
  });
  return { tenant: tenant === "" ? null : tenant, user };
}

/** The address of a subject's view. */
export const subjectLink = (layer, key) => `#/subject/${encodeURIComponent(layer)}/${encodeURIComponent(key)}`;
