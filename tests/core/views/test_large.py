"""A report of 500 sites and 10,000 steps: small enough to be mailed, and quick. Times are printed, not judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from retrograd.core.views.report import write_report
from tests.browser import Visit
from tests.core.views.invented import invent_training, make_history

pytestmark = [pytest.mark.browser, pytest.mark.slow]

INNER = ("ln_1", "attn.qkv_fc", "attn.softmax", "attn.out_fc", "attn", "ln_2", "mlp.fc1", "mlp.act", "mlp.fc2", "mlp")

TIME_REDRAW = """async () => {
    const frame = () => new Promise((done) => requestAnimationFrame(done));
    const times = [];
    for (let i = 0; i < 12; i++) {
        document.getElementById("viewport").scrollTop = 40 * (i + 1);
        await frame();
        await frame();
        times.push(performance.getEntriesByName("heat map")[0].duration);
    }
    return times.sort((a, b) => a - b)[6];
}"""


def test_ten_thousand_steps_of_five_hundred_sites(
    visit: Visit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [path for i in range(18) for path in (*(f"h.{i}.{name}" for name in INNER), f"h.{i}")]
    history = make_history(invent_training(paths, 10_000, bins=4))
    assert len(history.sites) == 540
    path = write_report(history, tmp_path / "report.html")
    assert path.stat().st_size < 8.5e6

    page = visit.open(path)
    expect(page.locator("#notice")).to_contain_text("10,000 steps drawn in")
    expect(page.locator("#notice")).to_contain_text("extremes kept")
    drawn = page.evaluate("performance.getEntriesByName('first paint')[0].startTime")
    page.locator("#unfold").click()
    expect(page.locator("#count")).to_have_text("198 sites")
    redraw = page.evaluate(TIME_REDRAW)
    page.locator(".label:not(.folder)").first.click()
    expect(page.locator(".panel .uplot")).to_have_count(6)
    with capsys.disabled():
        size = path.stat().st_size / 1e6
        print(f"\n540 sites × 10,000 steps: {size:.1f} MB, drawn after {drawn:.0f} ms, redraw {redraw:.1f} ms")
