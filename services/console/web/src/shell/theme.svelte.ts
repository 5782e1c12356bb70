// Dark or light: as the system has it, unless the person chose one.

const KEPT = "fulmen.theme";
export type Theme = "system" | "light" | "dark";

class ThemeChoice {
  choice = $state<Theme>((localStorage.getItem(KEPT) as Theme | null) ?? "system");
  /** Grows when colours change, for what draws with them itself. */
  version = $state(0);

  constructor() {
    this.#apply();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (this.version += 1));
  }

  choose(theme: Theme): void {
    this.choice = theme;
    localStorage.setItem(KEPT, theme);
    this.#apply();
  }

  #apply(): void {
    if (this.choice === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = this.choice;
    this.version += 1;
  }
}

export const theme = new ThemeChoice();
