"""Simulated weather: two layers of shallow water on the rotating sphere, written like ERA5.

Truncated at total wavenumber 21. An upper layer that is thicker in the tropics carries jets in thermal-wind
balance; they break into eddies by baroclinic instability, mountains bend them, and vapour in the lower layer
rains out. Nothing random enters after the start: a network learns dynamics from this record.

Shapes: (C, N, F, M) spectra, (W, H, F, M) grids (see datasets/spherical_harmonics.py); F fields, M members.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from numcodecs import Blosc

from datasets.spherical_harmonics import RADIUS, SphericalHarmonics
from errors import DataError

logger = logging.getLogger(__name__)

VERSION = 1  # raise it whenever the same parameters would give another record
NUM_YEARS, NUM_DAYS, FIRST_YEAR = 9, 100, 2001  # 1 January to 10 April of 2001..2009: the gaps are real
FINGERPRINT = "rossby_simulated"  # the attribute by which a store is known to be ours
SAMPLES_PER_DAY = 4

TRUNCATION, NUM_LAT, NUM_LON = 21, 32, 64  # 3 * 21 + 1 <= 64: no product of two fields is aliased
LATITUDE = -90 + 180 / NUM_LAT * (np.arange(NUM_LAT) + 0.5)  # degrees: the record's, without poles
LONGITUDE = 360 / NUM_LON * np.arange(NUM_LON)
RADIANS_EAST = 2 * np.pi / NUM_LON * np.arange(NUM_LON)
ROTATION, GRAVITY = 7.292e-5, 9.80665  # s-1, m s-2
LEVELS = (300, 850)  # hPa: what the upper and the lower layer are called in the record
VARIABLES = [
    f"{name}:{level}"
    for name in ("geopotential", "u_component_of_wind", "v_component_of_wind")
    for level in LEVELS
] + ["total_column_water_vapour"]
STATIC_VARIABLES = ["geopotential_at_surface", "land_sea_mask"]
GEOPOTENTIAL_MEAN = (90_000.0, 14_300.0)  # m2 s-2: ERA5's global means there, which layers cannot know

ZETA, DIV, DEPTH, VAPOUR = slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 7)  # the fields of a state
GRAVITY_WAVE = slice(2, 6)  # the four that gravity waves couple

_WATER = "lwe_thickness_of_atmosphere_mass_content_of_water_vapor"
ATTRIBUTES = {  # as WeatherBench2 has them
    name: {"long_name": long, "standard_name": standard, "units": units}
    for name, long, standard, units in (
        ("geopotential", "Geopotential", "geopotential", "m**2 s**-2"),
        ("u_component_of_wind", "U component of wind", "eastward_wind", "m s**-1"),
        ("v_component_of_wind", "V component of wind", "northward_wind", "m s**-1"),
        ("total_column_water_vapour", "Total column vertically-integrated water vapour", _WATER, "kg m**-2"),
        ("geopotential_at_surface", "Geopotential", "geopotential", "m**2 s**-2"),
        ("land_sea_mask", "Land-sea mask", "land_binary_mask", "(0 - 1)"),
    )
}


@dataclass(frozen=True)
class Parameters:
    """Parameters of the atmosphere, SI units; chosen for jets of 20-50 m/s, beyond marginal stability."""

    depth_upper: float = 8000.0  # m; deep enough that the tilted interface meets neither the ground
    depth_lower: float = 4000.0  # nor the top, thin enough below for baroclinic instability
    density_ratio: float = 0.82  # upper over lower; reduced gravity g' = 0.18 g
    jet_north: float = 46.0  # m s-1, peak of the vertical shear radiation drives toward: northern winter
    jet_south: float = 44.0
    radiation_time: float = 20 * 86400.0  # s
    drag_time: float = 6 * 86400.0  # s, lower layer only
    diffusion_time: float = 4 * 3600.0  # s at wavenumber 21, growing as 1 / (n (n + 1))^4 below it
    evaporation_time: float = 4 * 86400.0  # s over sea; four times as long over land
    condensation_time: float = 4 * 3600.0  # s
    saturation: float = 24.0  # kg m-2 at the mean temperature: gives 50 in the tropics and 5 at the poles
    vapour_scale_height: float = 2500.0  # m: a column over a mountain holds less
    step: float = 2700.0  # s: 8 make 6 h; 90 m/s times wavenumber 21 stays below one radian a step
    filter_strength: float = 0.05  # Robert-Asselin
    spin_up_days: int = 85
    mountains: tuple[tuple[float, ...], ...] = (  # latitude, longitude, height (m), half width (degrees)
        (38.0, 90.0, 2200.0, 16.0),
        (45.0, 250.0, 1600.0, 14.0),
        (-25.0, 295.0, 1300.0, 14.0),
        (5.0, 25.0, 700.0, 18.0),
    )


DEFAULTS = Parameters()


class TwoLayerModel:
    """Shallow-water equations of two layers, upper first: vorticity, divergence, depth; and vapour below.

    Semi-implicit leapfrog after Hoskins and Simmons (1975, doi 10.1002/qj.49710142918), for depths instead of
    temperatures. Spectra are (C, N, F, M); `forced=False` leaves only the inviscid equations.
    """

    def __init__(self, parameters: Parameters, dtype: torch.dtype, forced: bool = True) -> None:
        self.p, self.forced, self.dtype = parameters, forced, dtype
        self.mu, weights = np.polynomial.legendre.leggauss(NUM_LAT)  # sines of latitude, south to north
        self.transform = SphericalHarmonics(self.mu, RADIANS_EAST, TRUNCATION, weights, dtype)
        mu = torch.from_numpy(self.mu).to(dtype)[None, :, None, None]  # (1, H, 1, 1), as all grids
        self.cos2, self.coriolis = 1 - mu**2, 2 * ROTATION * mu
        ratio, n = parameters.density_ratio, torch.arange(TRUNCATION + 1)
        # Montgomery potential over g: phi1 = h1 + h2 + b, phi2 = ratio h1 + h2 + b.
        self.gravity = GRAVITY * torch.tensor([[1.0, 1.0], [ratio, 1.0]], dtype=dtype)
        self.linear = self._linear_operator()  # (N, 4, 4)
        identity = torch.eye(4, dtype=dtype)
        spans = (parameters.step, 2 * parameters.step)  # of the first step and of all others
        self.implicit = {span: torch.linalg.inv(identity - span / 2 * self.linear) for span in spans}
        self.orography = self.project(_mountains(parameters, self.mu) * forced)
        self.equilibrium = self.project(np.tile(equilibrium_depth(parameters, self.mu), (NUM_LON, 1)))
        sharpness = (n * (n + 1) / (TRUNCATION * (TRUNCATION + 1))).to(dtype) ** 4
        self.damping = (1 / (1 + 2 * parameters.step / parameters.diffusion_time * sharpness))[:, None, None]
        height = self.transform.synthesize(self.orography)
        self.land = land_fraction(height)
        self.column = torch.exp(-height.clamp(min=0) / parameters.vapour_scale_height)

    def _linear_operator(self) -> torch.Tensor:
        """Return L of d/dt (div1, div2, h1, h2) = L (...): gravity waves about a state of rest."""
        linear = torch.zeros(TRUNCATION + 1, 4, 4, dtype=self.dtype)
        linear[:, :2, 2:] = -self.transform.laplacian[:, None, None] * self.gravity
        linear[:, 2, 0], linear[:, 3, 1] = -self.p.depth_upper, -self.p.depth_lower
        return linear

    def project(self, grid: np.ndarray) -> torch.Tensor:
        """Return the spectrum (C, N, 1, 1) of one field (W, H) on the Gaussian grid."""
        return self.transform.analyze(torch.from_numpy(grid).to(self.dtype)[:, :, None, None] * self.cos2)[0]

    def adiabatic(self, state: torch.Tensor) -> torch.Tensor:
        """Return the tendencies (C, N, 7, M) by motion only."""
        scalars = torch.cat([state[:, :, ZETA], state[:, :, 4:]], dim=2)
        grids, u, v = self.transform.winds(scalars, state[:, :, ZETA], state[:, :, DIV])
        zeta, depth, vapour = grids.split([2, 2, 1], dim=2)
        vorticity = zeta + self.coriolis
        eastward = [u * vorticity, u * depth, u[:, :, 1:] * vapour]
        northward = [v * vorticity, v * depth, v[:, :, 1:] * vapour]
        energy = (u**2 + v**2) / 2
        flat, slope = self.transform.analyze(torch.cat([*eastward, *northward, energy], dim=2))
        east, north, energy = flat.split([5, 5, 2], dim=2)
        divergence = (self.transform.d_longitude(east) - slope[:, :, 5:10]) / RADIUS  # by parts: -F dP/dmu
        curl = (self.transform.d_longitude(north[:, :, :2]) + slope[:, :, :2]) / RADIUS
        potential = torch.einsum("ij,cnjm->cnim", self.gravity, state[:, :, DEPTH]) + GRAVITY * self.orography
        acceleration = curl - self.transform.laplacian[:, None, None] * (energy + potential)
        return torch.cat([-divergence[:, :, :2], acceleration, -divergence[:, :, 2:]], dim=2)

    def sources(self, state: torch.Tensor) -> torch.Tensor:
        """Return the tendencies (C, N, 7, M) by drag, radiation, evaporation and rain."""
        forcing = torch.zeros_like(state)
        forcing[:, :, 1:4:2] = -state[:, :, 1:4:2] / self.p.drag_time  # the lower layer's zeta and div
        forcing[:, :, 4] = (self.equilibrium[:, :, 0] - state[:, :, 4]) / self.p.radiation_time
        forcing[:, :, 5] = -forcing[:, :, 4]  # what one layer gains the other loses
        depth, vapour = self.transform.synthesize(state[:, :, 4:7:2]).split(1, dim=2)
        saturation = self.p.saturation * torch.exp(0.06 * temperature_anomaly(self.p, depth))  # 6 % a kelvin
        deficit = self.column * saturation - vapour
        evaporation = (1 - 0.75 * self.land) / self.p.evaporation_time
        rate = torch.where(deficit > 0, evaporation, 1 / self.p.condensation_time)
        forcing[:, :, VAPOUR] = self.transform.analyze(self.cos2 * rate * deficit)[0]
        return forcing

    def advance(self, before: torch.Tensor, now: torch.Tensor, span: float) -> torch.Tensor:
        """Return the state `span` seconds after `before`; gravity waves are implicit."""
        tendency = self.adiabatic(now)
        if self.forced:
            tendency = tendency + self.sources(before)  # lagged: leapfrog amplifies what is damped at `now`
        # (1 - span/2 L) (after - before) = span (tendency + L (before - now)), 4 x 4 for each wavenumber.
        waves = tendency[:, :, GRAVITY_WAVE] + self.linear @ (before - now)[:, :, GRAVITY_WAVE]
        waves = self.implicit[span] @ waves
        after = before + span * torch.cat([tendency[:, :, ZETA], waves, tendency[:, :, VAPOUR]], dim=2)
        return after * self.damping if self.forced else after

    def run(self, state: torch.Tensor, num_steps: int) -> Iterator[torch.Tensor]:
        """Yield the state after each of `num_steps` steps; the first step is a forward one."""
        before, now, span = state, state, self.p.step
        for _ in range(num_steps):
            after = self.advance(before, now, span)
            before = now + self.p.filter_strength * (before - 2 * now + after)
            now, span = after, 2 * self.p.step
            yield now


def temperature_anomaly(parameters: Parameters, depth_upper: torch.Tensor) -> torch.Tensor:
    """Return K from the depth (m) of the upper layer: g' h1 is the geopotential between the levels."""
    reduced = GRAVITY * (1 - parameters.density_ratio)
    return reduced * (depth_upper - parameters.depth_upper) / (287.0 * np.log(LEVELS[1] / LEVELS[0]))


def land_fraction(height: torch.Tensor) -> torch.Tensor:
    """Return the land fraction: above 100 m, higher than ripples of truncation; a coast up to 400 m."""
    return ((height - 100.0) / 300.0).clamp(0, 1)


def equilibrium_shear(parameters: Parameters, mu: np.ndarray) -> np.ndarray:
    """Return upper minus lower zonal wind (m s-1) of the radiative equilibrium, largest at 42 degrees."""
    peak = np.where(mu > 0, parameters.jet_north, parameters.jet_south)
    return peak * 22.0 * mu**4 * (1 - mu**2) ** 2.5  # 22: the largest value becomes one


def equilibrium_depth(parameters: Parameters, mu: np.ndarray) -> np.ndarray:
    """Return the depth (m) of the upper layer in balance with that shear: g' dh/dlat = -f u a."""
    sine = np.linspace(-1, 1, 4001)
    cosine = np.sqrt(np.maximum(1 - sine**2, 1e-12))  # the shear vanishes at the poles, the cosine must not
    slope = -2 * ROTATION * RADIUS * sine * equilibrium_shear(parameters, sine) / cosine
    slope /= GRAVITY * (1 - parameters.density_ratio)
    depth = np.concatenate([[0], np.cumsum((slope[1:] + slope[:-1]) / 2 * (sine[1] - sine[0]))])
    return parameters.depth_upper + np.interp(mu, sine, depth - depth.mean())


def _mountains(parameters: Parameters, mu: np.ndarray) -> np.ndarray:
    """Return heights (W, H) in m of smooth mountains, Gaussian in the distance along great circles."""
    latitude, longitude = np.arcsin(mu)[None], np.radians(LONGITUDE)[:, None]
    height = np.zeros((NUM_LON, len(mu)))
    for north, east, peak, width in parameters.mountains:
        cosine = np.sin(latitude) * np.sin(np.radians(north))
        cosine = cosine + np.cos(latitude) * np.cos(np.radians(north)) * np.cos(longitude - np.radians(east))
        height += peak * np.exp(-((np.degrees(np.arccos(cosine.clip(-1, 1))) / width) ** 2))
    return height


def initial_state(model: TwoLayerModel, num_members: int, seed: int) -> torch.Tensor:
    """Return (C, N, 7, M): balanced jets aloft, air at rest below, and noise in vorticity for each member."""
    state = torch.zeros(2 * TRUNCATION + 2, TRUNCATION + 1, 7, num_members, dtype=model.dtype)
    shear = torch.from_numpy(equilibrium_shear(model.p, model.mu)).to(model.dtype)[None, :, None, None]
    wind = (shear * model.cos2.sqrt()).expand(NUM_LON, -1, 1, 1)
    state[:, :, :1] = model.transform.analyze(wind)[1] / RADIUS  # curl of a zonal wind
    state[:, :, 4:5] = model.equilibrium
    state[:, :, 5:6] = -model.p.density_ratio * model.equilibrium - model.orography  # no force below
    state[0, 0, 5] = model.p.depth_lower * np.sqrt(2) - model.orography[0, 0, 0]  # P_00 is 1 / sqrt(2)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(state[:, :, 0].shape, generator=generator, dtype=torch.float64).to(model.dtype)
    n, m = torch.arange(TRUNCATION + 1), torch.arange(2 * TRUNCATION + 2)[:, None] % (TRUNCATION + 1)
    state[:, :, 0] += 2e-6 * noise * ((m > 0) & (m <= n) & (n <= 10))[:, :, None]
    return state


def integrate(model: TwoLayerModel, num_members: int, num_days: int, seed: int) -> torch.Tensor:
    """Return spectra (time, C, N, 7, M), six-hourly from the end of the spin-up on."""
    every = round(86400 / SAMPLES_PER_DAY / model.p.step)
    skipped = model.p.spin_up_days * SAMPLES_PER_DAY * every
    num_steps = skipped + num_days * SAMPLES_PER_DAY * every
    states = enumerate(model.run(initial_state(model, num_members, seed), num_steps), start=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # 19-21 s; two took 16 s on an idle machine, 33 and 92 s on a busy one
    try:
        return torch.stack([state for step, state in states if step % every == 0 and step > skipped])
    finally:
        torch.set_num_threads(threads)


def simulate(num_years: int, num_days: int, seed: int, parameters: Parameters = DEFAULTS) -> xr.Dataset:
    """Return six-hourly weather of `num_days` days from 1 January of `num_years` years, on the 64x32 grid.

    Each year is a member with its own start: years are independent. Variables are float32, (time, [level,]
    latitude, longitude), in WeatherBench2's names and units. A pure function of its arguments, bit-exact on
    one machine. Raises ValueError for parameters that blow up.
    """
    with torch.inference_mode():
        model = TwoLayerModel(parameters, torch.float32)
        spectra = integrate(model, num_years, num_days, seed)
        if not spectra.isfinite().all():
            raise ValueError(f"parameters = {parameters}: the flow blew up; shorten step or weaken the jets")
        sines = np.sin(np.radians(LATITUDE))
        transform = SphericalHarmonics(sines, RADIANS_EAST, TRUNCATION, dtype=model.dtype)
        members = enumerate(spectra.unbind(-1), FIRST_YEAR)
        seasons = [_season(model, transform, member, year) for year, member in members]
        height = transform.synthesize(model.orography)[:, :, 0, 0].T
    dataset = xr.concat(seasons, dim="time")
    static = {"geopotential_at_surface": GRAVITY * height, "land_sea_mask": land_fraction(height)}
    for name, field in static.items():
        dataset[name] = xr.DataArray(field.numpy(), dims=("latitude", "longitude"))
    for name, attributes in ATTRIBUTES.items():
        dataset[name].attrs = attributes
    return dataset


def _season(model: TwoLayerModel, output: SphericalHarmonics, spectra: torch.Tensor, year: int) -> xr.Dataset:
    """Return one member's spectra (time, C, N, 7) as fields on the latitudes of `output`."""
    spectra = spectra.permute(1, 2, 3, 0)  # (C, N, 7, time): time in the place of members
    scalars, u, v = output.winds(spectra[:, :, 4:], spectra[:, :, ZETA], spectra[:, :, DIV])
    mean_depth = torch.tensor([model.p.depth_upper, model.p.depth_lower])[:, None]
    potential = torch.einsum("ij,whjt->whit", model.gravity, scalars[:, :, :2] - mean_depth)
    potential += GRAVITY * output.synthesize(model.orography) + torch.tensor(GEOPOTENTIAL_MEAN)[:, None]
    cosine = torch.from_numpy(np.cos(np.radians(LATITUDE))).float()[:, None, None]
    vapour = scalars[:, :, 2].clamp(min=0)  # truncation undershoots where it is dry
    fields = {"geopotential": potential, "u_component_of_wind": u / cosine, "v_component_of_wind": v / cosine}
    dims = ("time", "level", "latitude", "longitude")
    data = {name: (dims, field.permute(3, 2, 1, 0).numpy()) for name, field in fields.items()}
    hours = np.arange(spectra.shape[-1]) * np.timedelta64(24 // SAMPLES_PER_DAY, "h")
    times = np.datetime64(f"{year}-01-01", "ns") + hours
    coords = {"time": times, "level": list(LEVELS), "latitude": LATITUDE, "longitude": LONGITUDE}
    season = xr.Dataset(data, coords)
    surface = xr.DataArray(vapour.permute(2, 1, 0).numpy(), dims=("time", "latitude", "longitude"))
    return season.assign(total_column_water_vapour=surface)


def ensure_simulated(path: str | Path, seed: int = 0) -> Path:
    """Return `path`, a Zarr (version 2, consolidated) of `simulate`, which the first caller writes.

    Safe among processes and after a crash: callers wait at a lock, and a store gets its name when it is
    whole. One of other parameters is replaced. Raises DataError for a path that is not ours.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    identity = json.dumps([VERSION, NUM_YEARS, NUM_DAYS, seed, asdict(DEFAULTS)])
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it even if the process dies
        if stored_fingerprint(path) != fingerprint:
            start = time.perf_counter()
            dataset = simulate(NUM_YEARS, NUM_DAYS, seed, DEFAULTS).assign_attrs({FINGERPRINT: fingerprint})
            _replace_store(dataset, path)
            logger.info("simulated %d years in %.1f s: %s", NUM_YEARS, time.perf_counter() - start, path)
    return path


def stored_fingerprint(path: Path) -> str | None:
    """Return the fingerprint of the store at `path`, None if there is none. Raises DataError."""
    if not path.exists():
        return None
    attributes = path / ".zattrs"
    stored = json.loads(attributes.read_text()).get(FINGERPRINT) if attributes.is_file() else None
    if stored is None:
        raise DataError(f"path = {path}: exists and is not simulated data; choose another path or remove it")
    return stored


def _replace_store(dataset: xr.Dataset, path: Path) -> None:
    """Write as WeatherBench2 does (Zarr 2, 100 times a chunk) under another name, then rename."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    compressors = Blosc(cname="lz4", clevel=5, shuffle=Blosc.BITSHUFFLE)
    encoding: dict[str, dict] = {"time": {"units": "hours since 1959-01-01", "dtype": "int64"}}
    for name, array in dataset.data_vars.items():
        chunks = tuple(min(size, 100) if dim == "time" else size for dim, size in array.sizes.items())
        encoding[str(name)] = {"compressors": compressors, "chunks": chunks, "_FillValue": None}
    dataset.to_zarr(partial, zarr_format=2, consolidated=True, encoding=encoding)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(partial, path)
