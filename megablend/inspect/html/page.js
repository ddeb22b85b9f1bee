"use strict";
for (const section of document.querySelectorAll("[data-table]")) {
  const body = section.querySelector("tbody");
  const input = section.querySelector("input");
  const status = section.querySelector("[role=status]");
  const rows = Array.from(body.rows);
  section.querySelector(".search").hidden = false;
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const row of rows) {
      const name = row.cells[0].textContent.toLowerCase();
      row.hidden = !words.every((word) => name.includes(word));
      shown += !row.hidden;
    }
    status.textContent = `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")} sources`;
  });
  const headers = Array.from(section.querySelectorAll("thead th"));
  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const down = header.getAttribute("aria-sort") === null ? column > 0 : header.getAttribute("aria-sort") === "ascending";
      headers.forEach((each) => each.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => {
        const cell = row.cells[column];
        return column === 0 ? cell.textContent : Number(cell.dataset.value || "-1");
      };
      rows.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
      });
      body.append(...rows);
    });
  });
}
