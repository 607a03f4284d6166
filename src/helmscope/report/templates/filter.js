
const box = document.getElementById("search");
const output = document.getElementById("shown");

function filter() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const part of document.querySelectorAll("[data-search]")) {
    const text = part.dataset.search.toLowerCase();
    part.hidden = !words.every((word) => text.includes(word));
  }
  const cards = [...document.querySelectorAll("article")];
  const shown = cards.filter((card) => card.getClientRects().length).length;
  output.textContent = `${shown} of ${cards.length} claims shown`;
}

box.addEventListener("input", filter);
document.querySelector("fieldset").addEventListener("change", filter);
filter();
