/** Light or dark: as the system says, unless the switch says otherwise. */

import { find } from "./dom.js";

const system = matchMedia("(prefers-color-scheme: dark)");
let wanted = "auto";

export const isDark = () => (wanted === "auto" ? system.matches : wanted === "dark");

/** Show "light", "dark", or what the system says ("auto"). */
export function showTheme(theme) {
  wanted = theme;
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  find("theme").setAttribute("aria-pressed", String(isDark()));
}

/** Show a theme; call `choose` with what the switch or the system chooses from then on. */
export function followTheme(theme = "auto", choose = showTheme) {
  showTheme(theme);
  system.addEventListener("change", () => choose(wanted));
  find("theme").addEventListener("click", () => {
    const other = isDark() ? "light" : "dark";
    choose((other === "dark") === system.matches ? "auto" : other);
  });
}
