/** Light or dark: as the system says, unless the switch says otherwise. */

import { find } from "./dom.js";
import { change, onChange, state } from "./state.js";

const system = matchMedia("(prefers-color-scheme: dark)");

export const isDark = () => (state.theme === "auto" ? system.matches : state.theme === "dark");

export function followTheme() {
  const show = () => {
    document.documentElement.dataset.theme = isDark() ? "dark" : "light";
    find("theme").setAttribute("aria-pressed", String(isDark()));
  };
  onChange(["theme"], show);
  system.addEventListener("change", () => change({ theme: state.theme }));
  find("theme").addEventListener("click", () => {
    const wanted = isDark() ? "light" : "dark";
    change({ theme: (wanted === "dark") === system.matches ? "auto" : wanted });
  });
  show();
}
