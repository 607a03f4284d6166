
const box = document.getElementById("search");
box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const part of document.querySelectorAll("[data-search]")) {
    const text = part.dataset.search.toLowerCase();
    part.hidden = !words.every((word) => text.includes(word));
  }
});
