// Claims by verdict, and links that open what they lead to.
{
  const boxes = [...document.querySelectorAll('input[name="verdict"]')], claims = [...document.querySelectorAll(".claim")];
  const show = () => {
    const wanted = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    for (const claim of claims) claim.hidden = !wanted.has(claim.dataset.verdict);
    for (const group of document.querySelectorAll(".group")) group.hidden = !group.querySelector(".claim:not([hidden])");
    document.getElementById("shown").textContent = `${claims.filter((claim) => !claim.hidden).length} of ${claims.length} claims are shown.`;
  };
  for (const box of boxes) box.addEventListener("change", show);
  for (const link of document.querySelectorAll(".board a")) link.addEventListener("click", () => {
    const claim = document.getElementById(link.hash.slice(1)).closest(".claim");
    if (claim.hidden) { for (const box of boxes) box.checked = true; show(); }
  });
  show();
}
