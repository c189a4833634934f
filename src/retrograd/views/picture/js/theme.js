/** Light or dark: as the system says, unless the switch says otherwise. */

import { find } from "./dom.js";

const system = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;

export function followTheme() {
  const show = () => {
    const isDark = chosen ?? system.matches;
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    find("theme").setAttribute("aria-pressed", String(isDark));
  };
  system.addEventListener("change", show);
  find("theme").addEventListener("click", () => {
    chosen = !(chosen ?? system.matches);
    if (chosen === system.matches) chosen = null;
    show();
  });
  show();
}
