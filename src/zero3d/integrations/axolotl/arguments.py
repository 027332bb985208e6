"""Keys that the plugin adds to a file of Axolotl's, checked by pydantic as its own are."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class Zero3dArgs(BaseModel):  # type: ignore[misc]
    """zero3d_stage: of ZeRO; zero3d_options: more of `zero3d.Engine`, such as {offload: {optimizer: host}}."""

    zero3d_stage: int | None = Field(default=None, ge=0, le=3)
    zero3d_options: dict[str, Any] | None = None
